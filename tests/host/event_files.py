"""The slow, plain way to read TensorBoard event files: parse each record, check both checksums, keep every event."""

import pathlib
import struct

import numpy as np
from tensorboard import data_compat
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.util import tensor_util


def read_records(data):
    records = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
        record, rest = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("<I", rest[:4]) == (masked_crc32c(record),)
        records.append(record)
        data = rest[4:]
    return records


def paths(logdir):
    return sorted(pathlib.Path(logdir).glob("*tfevents*"))


def read_events(logdir):
    """All events of a folder, files in order of their names."""
    return [event_pb2.Event.FromString(r) for path in paths(logdir) for r in read_records(path.read_bytes())]


def read_values(logdir, plugin="scalars"):
    """`{tag: [(step, array), ...]}` of one plugin, old-style values migrated as TensorBoard does."""
    found, plugins = {}, {}
    for event in read_events(logdir):
        for value in data_compat.migrate_event(event).summary.value:
            plugins.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
            if plugins[value.tag] == plugin:
                found.setdefault(value.tag, []).append((event.step, tensor_util.make_ndarray(value.tensor)))
    return found


def read_scalars(logdir):
    return {
        tag: [(step, np.float32(value[()])) for step, value in points] for tag, points in read_values(logdir).items()
    }
