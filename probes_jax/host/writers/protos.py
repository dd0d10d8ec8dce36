"""The messages that TensorBoard reads, from the `tensorboard` package's own TF-free copies.

None of these imports brings TensorFlow in, also where it is installed (a test keeps it so).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.audio import metadata as audio_plugin
from tensorboard.plugins.histogram import metadata as histogram_plugin
from tensorboard.plugins.hparams import summary_v2 as hparams_plugin
from tensorboard.plugins.image import metadata as image_plugin
from tensorboard.plugins.scalar import metadata as scalar_plugin
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.util import tensor_util

_events: Any = event_pb2  # generated modules: their names exist only at run time
_summaries: Any = summary_pb2

Event = _events.Event
SummaryMetadata = _summaries.SummaryMetadata
make_tensor_proto = tensor_util.make_tensor_proto


def version_event(now: float) -> Any:
    """The first event of every file."""
    source = _events.SourceMetadata(writer="probes_jax.host.writers.event")
    return Event(wall_time=now, file_version="brain.Event:2", source_metadata=source)


def start_event(step: int) -> Any:
    """A session goes on from `step`: readers hide earlier points of this and later steps."""
    return Event(step=step, session_log=_events.SessionLog(status=_events.SessionLog.START))


def scalar_metadata(description: str) -> Any:
    """Metadata of a scalar."""
    metadata: Any = scalar_plugin.create_summary_metadata("", description)
    metadata.data_class = _summaries.DATA_CLASS_SCALAR  # without it TensorBoard's fast loader drops the description
    return metadata


def text_metadata() -> Any:
    """Metadata of Markdown."""
    return text_plugin.create_summary_metadata("", "")


def histogram_metadata() -> Any:
    """Metadata of a tensor of `(left, right, count)` rows."""
    return histogram_plugin.create_summary_metadata("", "")


def image_metadata() -> Any:
    """Metadata of a tensor of width, height and PNGs."""
    return image_plugin.create_summary_metadata("", "")


def audio_metadata() -> Any:
    """Metadata of a tensor of WAVs and labels."""
    return audio_plugin.create_summary_metadata("", "", audio_plugin.Encoding.Value("WAV"))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if hasattr(value, "items"):
            flat.update(_flatten(value, f"{prefix}{key}."))
        elif isinstance(value, (list, tuple)):
            flat.update(_flatten({str(i): item for i, item in enumerate(value)}, f"{prefix}{key}."))
        elif isinstance(value, (bool, int, float, str, np.bool_, np.integer, np.floating)):
            flat[f"{prefix}{key}"] = value
        else:
            flat[f"{prefix}{key}"] = "" if value is None else str(value)
    return flat


def hparams_event(hparams: Mapping[str, Any], now: float) -> Any:
    """Hyper-parameters; nested ones get dotted names, None is empty, unusual types become their text."""
    return Event(summary=hparams_plugin.hparams_pb(_flatten(hparams), start_time_secs=now))
