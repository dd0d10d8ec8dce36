"""Names in a run's folder; the folder as somebody without this library reads it."""

import json
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorstore

from probes_jax.host.run_folder import FORMAT, RunFolder, check_folder, open_run
from probes_jax.host.store import Store
from probes_jax.host.store_sink import StoreSink
from probes_jax.spec.readings import Readings


def record(path, steps=range(3)):
    sink = StoreSink(path)
    names = ("loss/mean", "grad/norm")
    for step in steps:
        values = np.array([step + 0.5, np.nan])
        sink.write(Readings(step, "light", names, values, np.array([True, step != 1])))
    sink.close()


@pytest.mark.parametrize("root", ["runs/demo", "runs/demo/", pathlib.Path("runs/demo")])
def test_everything_has_one_name(root):
    folder = RunFolder(root)
    assert (folder.root, folder.events) == ("runs/demo", "runs/demo/events")
    assert (folder.series, folder.entries, folder.flight) == (
        "runs/demo/series",
        "runs/demo/entries",
        "runs/demo/flight",
    )


def test_urls_keep_their_scheme():
    assert RunFolder("gs://bucket/run/").events == "gs://bucket/run/events"
    assert RunFolder("/").events == "/events"
    check_folder("gs://bucket/run")  # not a local folder: nothing to check


def test_only_a_run_opens(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing was recorded"):
        open_run(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_a_newer_format_is_refused_with_both_numbers(tmp_path):
    record(tmp_path)
    Store(str(tmp_path)).write("entries/run.json", {"format": FORMAT + 1, "created": 0.0})
    with pytest.raises(ValueError, match=f"format {FORMAT + 1}, this version reads {FORMAT}"):
        open_run(tmp_path)


def test_reading_imports_neither_jax_nor_tensorflow(tmp_path):
    record(tmp_path)
    code = """
        import sys
        from probes_jax.host.run_folder import open_run
        print(open_run(sys.argv[1]).series("loss/mean")[1].tolist())
        print(sorted({"jax", "tensorflow", "tensorboard", "clu"} & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["[0.5, 1.5, 2.5]", "[]"]


def test_the_documented_way_to_read_without_this_library(tmp_path):
    """The recipe of `docs/run_folder.md`: JSON, any zarr v3 reader, NumPy."""
    record(tmp_path)
    (entry,) = sorted(tmp_path.glob("entries/series/*/*.json"))
    series = json.loads(entry.read_text())
    names = json.loads((tmp_path / "entries" / "columns" / f"{series['columns']}.json").read_text())["names"]

    def array(name):
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / series["path"] / name)}}
        return tensorstore.open(spec).result().read().result()

    step, wall_time, values = array("step"), array("wall_time"), array("values")
    rows = step >= 0
    absent = values.view(np.uint64) == 0x7FF800000000AB5E
    assert step[rows].tolist() == [0, 1, 2]
    assert np.isfinite(wall_time[rows]).all()
    assert values[rows, names.index("loss/mean")].tolist() == [0.5, 1.5, 2.5]
    assert absent[rows, names.index("grad/norm")].tolist() == [False, True, False]
    assert np.isnan(values[rows, names.index("grad/norm")]).all()


def test_zarr_itself_reads_the_arrays(tmp_path):
    zarr = pytest.importorskip("zarr")
    record(tmp_path)
    (entry,) = sorted(tmp_path.glob("entries/series/*/*.json"))
    values = zarr.open_array(str(tmp_path / json.loads(entry.read_text())["path"] / "values"), mode="r")[:]
    assert values[:3, 0].tolist() == [0.5, 1.5, 2.5]
    assert (values[3:].view(np.uint64) == 0x7FF800000000AB5E).all()
