"""One contract for every writer: `EventWriter`, CLU's own, and CLU's around `EventWriter`.

Files are read back with TensorBoard's own readers. Importing CLU's writers imports TensorFlow, which takes seconds:
only this module does it.
"""

import collections
import logging
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from probes_jax.host.writers.clu import WriterSink, as_metric_writer, default_writer
from probes_jax.host.writers.event import EventWriter
from probes_jax.spec.readings import Readings
from tests.host.event_files import read_scalars


def _clu():
    pytest.importorskip("tensorflow", reason="CLU's writers need TensorFlow")
    from clu import metric_writers

    return metric_writers


WRITERS = {
    "EventWriter": EventWriter,
    "clu SummaryWriter": lambda logdir: _clu().SummaryWriter(str(logdir)),
    "clu AsyncMultiWriter": lambda logdir: _clu().AsyncMultiWriter([_clu().SummaryWriter(str(logdir))]),
    "clu AsyncMultiWriter of EventWriter": lambda logdir: _clu().AsyncMultiWriter([EventWriter(logdir)]),
}
MARKS = {name: pytest.mark.tensorflow if "clu" in name else () for name in WRITERS}


@pytest.fixture(params=[pytest.param(name, marks=MARKS[name]) for name in WRITERS])
def make(request):
    return WRITERS[request.param]


def load(logdir):
    """`{plugin: {tag: [(step, array), ...]}}`, by the loader behind TensorBoard's front end."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    found, plugin_of = collections.defaultdict(lambda: collections.defaultdict(list)), {}
    for path in sorted(logdir.glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                plugin_of.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
                data = tensor_util.make_ndarray(value.tensor)
                found[plugin_of[value.tag]][value.tag].append((event.step, data))
    return found


def scalars(logdir):
    return {
        tag: [(step, float(np.float32(data[()]))) for step, data in points]
        for tag, points in load(logdir)["scalars"].items()
    }


def test_scalars_come_back_with_their_steps(make, tmp_path):
    writer = as_metric_writer(make(tmp_path))
    for step in (0, 5, 7):
        writer.write_scalars(step, {"loss/mean": step + 0.5, "grad/norm": 2.0 * step})
    writer.write_scalars(8, {"loss/mean": 1.0})
    writer.flush()
    expected = {
        "loss/mean": [(0, 0.5), (5, 5.5), (7, 7.5), (8, 1.0)],
        "grad/norm": [(0, 0.0), (5, 10.0), (7, 14.0)],
    }
    assert scalars(tmp_path) == expected  # readable after flush, before close
    writer.close()
    assert scalars(tmp_path) == expected


def test_l093_every_kind_of_number_comes_back(make, tmp_path):
    values = {
        "device": jnp.float32(2.5),
        "numpy": np.float32(2.5),
        "array": np.array(2.5),
        "int": 3,
        "float": 2.5,
        "bf16": jnp.bfloat16(2.5),
    }
    writer = make(tmp_path)
    writer.write_scalars(1, values)
    writer.close()
    assert scalars(tmp_path) == {name: [(1, float(value))] for name, value in values.items()}


def test_l069_nan_of_every_type_comes_back_as_nan(make, tmp_path):
    kinds = {"py": math.nan, "f64": np.float64("nan"), "f32": np.float32("nan"), "bf16": ml_dtypes.bfloat16("nan")}
    writer = make(tmp_path)
    writer.write_scalars(1, {**kinds, "inf": math.inf})
    writer.close()
    found = scalars(tmp_path)
    assert all(math.isnan(found[name][0][1]) for name in kinds)
    assert found["inf"] == [(1, math.inf)]


def test_media_texts_and_histograms_arrive_at_their_plugins(make, tmp_path):
    writer = make(tmp_path)
    writer.write_texts(1, {"text": "**bold**"})
    writer.write_images(1, {"image": np.zeros((2, 4, 6, 3), np.float32), "single": np.zeros((4, 6, 1), np.float32)})
    writer.write_audios(1, {"audio": np.zeros((2, 16, 1), np.float32)}, sample_rate=8000)
    writer.write_histograms(1, {"histogram": np.arange(10.0)}, num_buckets={"histogram": 4})
    writer.write_videos(1, {"video": np.zeros((1, 2, 4, 6, 3), np.float32)})
    writer.write_hparams({"lr": 0.1, "model": {"depth": 2}})
    writer.close()
    found = load(tmp_path)
    assert found["text"]["text"][0][1].ravel().tolist() == [b"**bold**"]
    (image,) = (data for _, data in found["images"]["image"])
    assert image[:2].tolist() == [b"6", b"4"]
    assert all(png.startswith(b"\x89PNG") for png in image[2:])
    assert (len(image), len(found["images"]["single"][0][1])) == (4, 3)
    (audio,) = (data for _, data in found["audio"]["audio"])
    assert audio.shape == (2,)  # the loader drops the empty labels
    assert audio[0].startswith(b"RIFF")
    (histogram,) = (data for _, data in found["histograms"]["histogram"])
    assert histogram[:, 2].sum() == 10
    assert histogram.shape == (4, 3)
    assert (histogram[0, 0], histogram[-1, 1]) == (0.0, 9.0)
    assert "_hparams_/session_start_info" in found["hparams"]


def test_sink_writes_selected_metrics_through_any_writer(make, tmp_path):
    names = ("loss/mean", "grad/norm", "act/a/abs_max", "act/b/abs_max")
    sink = WriterSink(make(tmp_path))
    for step in range(3):
        values = np.array([step, np.nan, 1.0, 2.0])
        sink.write(Readings(step, "full", names, values, np.array([True, step == 1, True, True])))
    sink.close()
    sink.close()
    found = scalars(tmp_path)
    assert sorted(found) == ["grad/norm", "loss/mean", "top/act/abs_max/1", "top/act/abs_max/2"]
    assert found["loss/mean"] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [step for step, _ in found["grad/norm"]] == [1]  # absent is no point
    assert math.isnan(found["grad/norm"][0][1])  # a measured NaN is one
    assert load(tmp_path)["text"]["top/act/abs_max/layers"][0][1].ravel()[0].decode() == "1. `b`\n2. `a`"


def test_l100_one_value_per_step_after_a_restart_for_all_tags(tmp_path, caplog):
    """Steps 1..5, restart at 3, steps 3..6; one tag is not written again after the restart."""
    from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

    caplog.set_level(logging.ERROR, "tensorboard")
    for steps, resume, tags in ((range(1, 6), None, ("a", "b", "c")), (range(3, 7), 3, ("a", "b"))):
        writer = EventWriter(tmp_path, resume_step=resume)
        for step in steps:
            writer.write_scalars(step, dict.fromkeys(tags, step + (100.0 if resume else 0.0)))
        writer.close()
    wanted = [(1, 1.0), (2, 2.0), (3, 103.0), (4, 104.0), (5, 105.0), (6, 106.0)]
    old = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    new = plugin_event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    for tag, points in (("a", wanted), ("b", wanted), ("c", wanted[:2])):
        assert [(p.step, p.value) for p in old.Scalars(tag)] == points
        assert [(p.step, p.tensor_proto.float_val[0]) for p in new.Tensors(tag)] == points
    assert [step for step, _ in read_scalars(tmp_path)["a"]] == [1, 2, 3, 4, 5, 3, 4, 5, 6]  # the raw log keeps both


def test_l100_the_sink_announces_a_restart_by_itself(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator

    for steps in ((1, 2, 3, 4, 5), (3, 4, 5, 6, 4, 5)):  # a second session, which also goes back once
        sink = WriterSink(default_writer(str(tmp_path)))
        for step in steps:
            value = np.array([float(step * len(steps))])
            sink.write(Readings(step, "light", ("loss/mean",), value, np.ones(1, bool)))
        sink.close()
    found = event_accumulator.EventAccumulator(str(tmp_path)).Reload().Scalars("loss/mean")
    assert [(p.step, p.value) for p in found] == [(1, 5.0), (2, 10.0), (3, 18.0), (4, 24.0), (5, 30.0)]


def test_layers_are_named_when_they_change_also_if_the_first_try_fails():
    class Texts:
        fail, texts = True, []

        def write_scalars(self, step, scalars):
            pass

        def write_texts(self, step, texts):
            if self.fail:
                raise OSError
            self.texts.append((step, texts["top/act/abs_max/layers"]))

        def flush(self):
            pass

    writer, names = Texts(), ("act/a/abs_max", "act/b/abs_max")
    sink = WriterSink(writer)
    rows = [
        Readings(step, "full", names, np.array(v), np.ones(2, bool)) for step, v in enumerate([(1, 2), (1, 3), (4, 3)])
    ]
    with pytest.raises(OSError):  # noqa: PT011 - the fake writer's own
        sink.write(rows[0])
    writer.fail = False
    for row in rows:
        sink.write(row)
    sink.close()  # a writer without close is flushed
    assert writer.texts == [(0, "1. `b`\n2. `a`"), (2, "1. `a`\n2. `b`")]


@pytest.mark.tensorflow
def test_l100_a_run_that_clu_began_is_resumed(tmp_path, caplog):
    from tensorboard.backend.event_processing import plugin_event_accumulator

    caplog.set_level(logging.ERROR, "tensorboard")
    before = _clu().SummaryWriter(str(tmp_path))
    for step in range(1, 6):
        before.write_scalars(step, {"loss": float(step)})
    before.close()
    after = EventWriter(tmp_path, resume_step=3)
    after.write_scalars(3, {"loss": 103.0})
    after.close()
    found = plugin_event_accumulator.EventAccumulator(str(tmp_path)).Reload().Tensors("loss")
    assert [point.step for point in found] == [1, 2, 3]


@pytest.mark.tensorflow
def test_clu_logging_writer_takes_the_same_sink(caplog):
    writer = _clu().LoggingWriter()
    sink = WriterSink(writer)
    with caplog.at_level(logging.INFO):
        sink.write(Readings(4, "light", ("loss/mean",), np.array([2.5]), np.ones(1, bool)))
        sink.flush()
        sink.close()
    assert any("loss/mean=2.5" in record.getMessage() for record in caplog.records)


@pytest.mark.tensorflow
def test_clu_utilities_accept_event_writer(tmp_path):
    metric_writers = _clu()
    writer = EventWriter(tmp_path)
    with metric_writers.ensure_flushes(writer):
        metric_writers.write_values(writer, 3, {"loss": 1.5})
    assert scalars(tmp_path) == {"loss": [(3, 1.5)]}
    multi = metric_writers.MultiWriter([writer, metric_writers.LoggingWriter()])
    multi.write_scalars(4, {"loss": 2.5})
    multi.close()
    assert scalars(tmp_path) == {"loss": [(3, 1.5), (4, 2.5)]}


@pytest.mark.tensorflow
def test_event_writer_has_every_method_of_clus_interface():
    import inspect

    interface = _clu().MetricWriter
    for name in interface.__abstractmethods__:
        wanted = inspect.signature(getattr(interface, name)).parameters
        found = inspect.signature(getattr(EventWriter, name)).parameters
        assert list(found) == list(wanted), name
        assert [p.kind for p in found.values()] == [p.kind for p in wanted.values()], name


@pytest.mark.parametrize("bad", [object(), None, "runs/demo", EventWriter])
def test_what_is_no_writer_is_refused_clearly(bad):
    with pytest.raises(TypeError, match=r"clu.metric_writers.MetricWriter|must be an instance"):
        as_metric_writer(bad)


def test_the_default_writer_is_event_writer(tmp_path):
    assert type(default_writer(str(tmp_path))) is EventWriter
