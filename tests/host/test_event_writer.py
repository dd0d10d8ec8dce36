"""`EventWriter`: what it accepts, when it touches the disk, what its bytes say."""

import io
import math
import os
import struct
import subprocess
import sys
import textwrap
import wave
import zlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from probes_jax.host.writers import record
from probes_jax.host.writers.event import EventWriter
from probes_jax.host.writers.media import encode_png, encode_wav, histogram_buckets
from probes_jax.spec.catalog import REGISTRY
from tests.host.event_files import paths, read_events, read_scalars, read_values

SIX_KINDS = {
    "device scalar": jnp.float32(2.5),
    "numpy scalar": np.float32(2.5),
    "0-d array": np.array(2.5),
    "int": 3,
    "bool": True,
    "bf16": jnp.bfloat16(2.5),
}
NAN_KINDS = {
    "python": math.nan,
    "float64": np.float64("nan"),
    "float32": np.float32("nan"),
    "float16": np.float16("nan"),
    "bf16": ml_dtypes.bfloat16("nan"),
    "device": jnp.float32(jnp.nan),
    "negative": -np.float32("nan"),
    "payload": np.uint32(0x7FC0AB5E).view(np.float32),
}


def test_l093_every_kind_of_number_is_written(tmp_path):
    writer = EventWriter(tmp_path)
    writer.write_scalars(7, SIX_KINDS)
    writer.close()
    expected = {name: [(7, np.float32(float(value)))] for name, value in SIX_KINDS.items()}
    assert read_scalars(tmp_path) == expected


@pytest.mark.parametrize("bad", ["2.5", None, 2.5j, [1.0, 2.0], np.zeros(1), object(), {"a": 1}, 10**400])
def test_l093_anything_else_raises_at_the_call_and_names_the_key(tmp_path, bad):
    writer = EventWriter(tmp_path)
    with pytest.raises(TypeError, match="the/key"):
        writer.write_scalars(1, {"fine": 1.0, "the/key": bad})
    writer.close()
    assert paths(tmp_path) == []  # all values of a call or none


def test_l069_every_nan_gives_the_same_record(tmp_path):
    for index, value in enumerate(NAN_KINDS.values()):
        writer = EventWriter(tmp_path / str(index), clock=lambda: 5.0)
        writer.write_scalars(1, {"loss": value})
        writer.close()
    records = {read_events(tmp_path / str(i))[-1].SerializeToString() for i in range(len(NAN_KINDS))}
    assert len(records) == 1
    assert all(math.isnan(v) for _, v in read_scalars(tmp_path / "0")["loss"])


def test_infinities_and_large_values_show(tmp_path):
    writer = EventWriter(tmp_path)
    writer.write_scalars(1, {"up": math.inf, "down": -np.float16(np.inf), "count": 10**12})
    writer.close()
    found = read_scalars(tmp_path)
    assert (found["up"][0][1], found["down"][0][1]) == (np.inf, -np.inf)
    assert found["count"][0][1] == np.float32(10**12)


@pytest.mark.parametrize("step", [None, 1.0, True, "3"])
def test_l104_a_step_is_required_and_an_integer(tmp_path, step):
    with pytest.raises(TypeError, match="step must be an integer"):
        EventWriter(tmp_path).write_scalars(step, {"loss": 1.0})


def test_l146_all_values_of_a_step_travel_in_one_event(tmp_path):
    writer = EventWriter(tmp_path)
    for step in range(3):
        writer.write_scalars(np.int64(step), {f"metric/{i}": i for i in range(100)})
    writer.write_scalars(3, {})  # nothing to say, nothing written
    writer.close()
    events = [event for event in read_events(tmp_path) if event.HasField("summary")]
    assert [(event.step, len(event.summary.value)) for event in events] == [(0, 100), (1, 100), (2, 100)]


def test_first_record_names_the_version_and_tags_are_described_once(tmp_path):
    writer = EventWriter(tmp_path, clock=lambda: 1234.5)
    for step in (1, 2):
        writer.write_scalars(step, {"loss/mean": 2.0, "my/own": 1.0})
    writer.close()
    version, first, second = read_events(tmp_path)
    assert (version.file_version, version.wall_time) == ("brain.Event:2", 1234.5)
    described = {value.tag: value.metadata for value in first.summary.value}
    assert REGISTRY["loss/mean"].definition in described["loss/mean"].summary_description
    assert described["my/own"].plugin_data.plugin_name == "scalars"
    assert not any(value.HasField("metadata") for value in second.summary.value)


def test_l085_l098_nothing_is_created_before_the_first_write(tmp_path):
    logdir = tmp_path / "new" / "events"
    writer = EventWriter(logdir, resume_step=4)
    writer.flush()
    assert not logdir.parent.exists()
    writer.close()
    assert not logdir.parent.exists()


def test_l085_a_folder_that_cannot_be_made_is_said_at_set_up(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"logdir .*file.* is not a folder"):
        EventWriter(tmp_path / "file" / "events")


def test_l091_an_unwritable_path_raises_at_the_write_and_memory_stays_flat(tmp_path):
    writer = EventWriter(tmp_path / "events")
    (tmp_path / "events").write_text("in the way")
    for step in range(100):
        with pytest.raises(OSError):  # noqa: PT011 - the system's own error
            writer.write_scalars(step, {"loss": 1.0})
    (tmp_path / "events").unlink()
    writer.write_scalars(100, {"loss": 1.0})  # works again once the path does
    writer.close()
    assert read_scalars(tmp_path / "events") == {"loss": [(100, 1.0)]}


def test_l091_a_deleted_file_is_noticed_and_a_new_one_started(tmp_path):
    writer = EventWriter(tmp_path)
    writer.write_scalars(1, {"loss/mean": 1.0})
    writer.flush()
    paths(tmp_path)[0].unlink()
    writer.write_scalars(2, {"loss/mean": 2.0})
    with pytest.raises(FileNotFoundError, match="was deleted"):
        writer.flush()
    writer.write_scalars(3, {"loss/mean": 3.0})
    writer.close()
    assert read_scalars(tmp_path) == {"loss/mean": [(3, 3.0)]}
    assert read_events(tmp_path)[-1].summary.value[0].HasField("metadata")


def test_a_full_disk_breaks_no_record(tmp_path):
    class Disk:
        def __init__(self):
            self.room, self.file = 90, open(tmp_path / "records", "wb", buffering=0)  # noqa: SIM115

        def fileno(self):
            return self.file.fileno()

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            done = self.file.write(bytes(data[: self.room]))
            self.room -= done
            return done

        def close(self):
            self.file.close()

    file = record.RecordFile(str(tmp_path / "records"))
    file._file.close()
    file._file = disk = Disk()
    wanted = [b"a" * 50, b"b" * 50, b"c" * 50]
    for data in wanted:
        file.append(data)
    with pytest.raises(OSError, match="No space"):
        file.flush()
    disk.room = 10**6
    file.close()
    assert (tmp_path / "records").read_bytes() == b"".join(record.frame(data) for data in wanted)


def test_waiting_records_are_bounded(tmp_path, monkeypatch):
    file = record.RecordFile(str(tmp_path / "r"))
    monkeypatch.setattr(file, "flush", lambda: (_ for _ in ()).throw(OSError("full")))
    for _ in range(4):
        file.append(b"x" * (1 << 20))
    with pytest.raises(OSError, match="full"):
        file.append(b"x")


def test_flush_and_time_make_records_readable(tmp_path):
    now = [100.0]
    writer = EventWriter(tmp_path, clock=lambda: now[0], flush_seconds=10.0)
    writer.write_scalars(1, {"loss": 1.0})
    assert read_scalars(tmp_path) == {}
    writer.flush()
    assert len(read_scalars(tmp_path)["loss"]) == 1
    writer.write_scalars(2, {"loss": 1.0})
    now[0] += 11
    writer.write_scalars(3, {"loss": 1.0})
    assert [step for step, _ in read_scalars(tmp_path)["loss"]] == [1, 2]
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write_scalars(4, {"loss": 1.0})


def test_a_killed_process_leaves_what_was_flushed(tmp_path):
    code = """
        import os, sys
        from probes_jax.host.writers.event import EventWriter
        writer = EventWriter(sys.argv[1])
        for step in range(38):
            writer.write_scalars(step, {"loss": step})
        writer.flush()
        os._exit(1)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=False)
    assert [step for step, _ in read_scalars(tmp_path)["loss"]] == list(range(38))


def test_l158_neither_tensorflow_nor_jax_is_imported(tmp_path):
    code = """
        import sys
        import numpy as np
        from probes_jax.host.writers.event import EventWriter
        writer = EventWriter(sys.argv[1])
        writer.write_scalars(1, {"loss/mean": 1.0})
        writer.write_texts(1, {"t": "x"}); writer.write_histograms(1, {"h": np.arange(9)})
        writer.write_images(1, {"i": np.zeros((2, 2, 3))})
        writer.write_audios(1, {"a": np.zeros((1, 8, 1))}, sample_rate=8)
        writer.write_hparams({"lr": 0.1}); writer.close()
        print(sorted({"tensorflow", "jax"} & set(sys.modules)))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert run.stdout.strip() == "[]"


def test_a_later_session_sorts_after_an_earlier_one_whatever_its_clock_says(tmp_path):
    for session, now in enumerate((1000.9, 1000.1, 3.0)):
        writer = EventWriter(tmp_path, clock=lambda now=now: now)
        writer.write_scalars(session, {"loss": 1.0})
        writer.close()
    assert [step for step, _ in read_scalars(tmp_path)["loss"]] == [0, 1, 2]
    assert len({os.path.basename(path).split(".")[3] for path in paths(tmp_path)}) == 3


def test_both_checksums_agree():
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    for data in (b"", b"123456789", bytes(range(256)) * 9):
        assert record.masked_crc32c(data) == masked_crc32c(data)


def test_url_folders_go_through_fsspec(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    writer = EventWriter("memory://run/events")
    writer.write_scalars(1, {"loss": 2.0})
    writer.flush()
    writer.write_scalars(2, {"loss": 3.0})
    writer.close()
    files = fsspec.filesystem("memory").glob("/run/events/*")
    (tmp_path / "events.out.tfevents.1.x").write_bytes(fsspec.filesystem("memory").cat(files[0]))
    assert read_scalars(tmp_path) == {"loss": [(1, 2.0), (2, 3.0)]}


def test_histograms_show_what_has_no_bucket(tmp_path):
    values = np.array([np.nan, 1.0, 2.0, 4.0, np.inf, 2.5])
    writer = EventWriter(tmp_path)
    writer.write_histograms(1, {"h": values}, num_buckets={"h": 3})
    writer.close()
    ((step, buckets),) = read_values(tmp_path, "histograms")["h"]
    assert step == 1
    np.testing.assert_array_equal(buckets, [[1.0, 2.0, 1], [2.0, 3.0, 2], [3.0, 4.0, 1]])
    assert read_scalars(tmp_path) == {"h/nonfinite_count": [(1, 2.0)]}


def test_histogram_of_nothing_and_of_equal_values():
    assert histogram_buckets(np.zeros(0)).shape == (0, 3)
    assert histogram_buckets(np.full(5, 2.0)).tolist() == [[2.0, 2.0, 5.0]]


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_pixels_survive(channels):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)
    data = encode_png(pixels)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    found, offset = {}, 8
    while offset < len(data):
        (length,) = struct.unpack(">I", data[offset : offset + 4])
        kind, body = data[offset + 4 : offset + 8], data[offset + 8 : offset + 8 + length]
        assert struct.unpack(">I", data[offset + 8 + length : offset + 12 + length]) == (zlib.crc32(kind + body),)
        found[kind] = body
        offset += 12 + length
    assert struct.unpack(">II", found[b"IHDR"][:8]) == (7, 5)
    rows = np.frombuffer(zlib.decompress(found[b"IDAT"]), np.uint8).reshape(5, 1 + 7 * channels)
    np.testing.assert_array_equal(rows[:, 1:].reshape(5, 7, channels), pixels)


def test_images_are_scaled_and_refused_clearly(tmp_path):
    writer = EventWriter(tmp_path)
    writer.write_images(1, {"one": np.zeros((4, 6, 3), np.uint8), "two": np.ones((2, 4, 6, 1), ml_dtypes.bfloat16)})
    with pytest.raises(TypeError, match="uint8, bool or a float"):
        writer.write_images(1, {"bad": np.zeros((4, 6, 3), np.int64)})
    with pytest.raises(ValueError, match=r"\[N, H, W, C\]"):
        writer.write_images(1, {"bad": np.zeros((4, 6), np.uint8)})
    with pytest.raises(ValueError, match="channels"):
        writer.write_images(1, {"bad": np.zeros((4, 6, 7), np.uint8)})
    writer.close()
    found = read_values(tmp_path, "images")
    assert [len(found[tag][0][1]) for tag in ("one", "two")] == [3, 4]
    assert found["one"][0][1][:2].tolist() == [b"6", b"4"]


def test_wav_samples_survive():
    samples = np.linspace(-1, 1, 16).reshape(8, 2)
    with wave.open(io.BytesIO(encode_wav(samples, 8000))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 8000, 8)
        found = np.frombuffer(file.readframes(8), "<i2").reshape(8, 2)
    np.testing.assert_allclose(found / 32767.0, samples, atol=1 / 32767)


def test_videos_are_dropped_counted_and_said_once(tmp_path, caplog):
    writer = EventWriter(tmp_path)
    for step in range(3):
        writer.write_videos(step, {"a": np.zeros((1, 2, 2, 2, 3)), "b": np.zeros((1, 2, 2, 2, 3))})
    assert writer.dropped == {"videos": 6}
    assert len(caplog.records) == 1


def test_hparams_are_flattened_as_clu_does(tmp_path):
    from tensorboard.plugins.hparams import metadata

    writer = EventWriter(tmp_path)
    writer.write_hparams({"lr": 0.1, "model": {"dims": (4, 8), "name": "x"}, "none": None, "dtype": np.dtype("f4")})
    writer.close()
    (value,) = read_events(tmp_path)[-1].summary.value
    found = metadata.parse_session_start_info_plugin_data(value.metadata.plugin_data.content).hparams
    assert sorted(found) == ["dtype", "lr", "model.dims.0", "model.dims.1", "model.name", "none"]
    assert (found["lr"].number_value, found["dtype"].string_value) == (0.1, "float32")


def test_arbitrary_summaries_keep_their_plugin_and_data(tmp_path):
    from tensorboard.compat.proto import summary_pb2

    plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="mine", content=b"x")
    proto = summary_pb2.SummaryMetadata(plugin_data=plugin)
    writer = EventWriter(tmp_path)
    values = {"a": np.arange(6).reshape(2, 3), "b": np.array(["x", "y"]), "c": jnp.ones(2, jnp.bfloat16)}
    writer.write_summaries(1, values, metadata={"a": proto, "b": proto.SerializeToString(), "c": proto})
    writer.close()
    found = read_values(tmp_path, "mine")
    np.testing.assert_array_equal(found["a"][0][1], np.arange(6).reshape(2, 3))
    assert found["b"][0][1].tolist() == [b"x", b"y"]
    np.testing.assert_array_equal(found["c"][0][1], [1.0, 1.0])
