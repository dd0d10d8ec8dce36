"""The demo's text: three sources, byte batches, padding at the end of a document."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import numpy as np
import pytest

_PATH = pathlib.Path(__file__).parents[2] / "examples" / "text.py"
_SPEC = importlib.util.spec_from_file_location("demo_text", _PATH)
text = importlib.util.module_from_spec(_SPEC)
sys.modules["demo_text"] = text
_SPEC.loader.exec_module(text)


@pytest.fixture(scope="module")
def sources():
    return text.load_sources()


def _take(sources, count, **settings):
    stream = text.batches(sources, **settings)
    return [next(stream) for _ in range(count)]


def test_every_source_has_text(sources):
    assert tuple(source.name for source in sources) == text.SOURCES
    for source in sources:
        assert source.data.dtype == np.uint8
        assert source.data.size > 10_000
        assert source.starts[0] == 0 and source.starts[-1] == source.data.size
        assert (np.diff(source.starts) >= 64).all()


def test_law_is_there_without_any_file_of_the_system(monkeypatch, tmp_path):
    monkeypatch.setattr(text.sysconfig, "get_paths", lambda: dict.fromkeys(("stdlib", "purelib"), str(tmp_path)))
    monkeypatch.setattr(text.sys, "base_prefix", str(tmp_path))
    assert any(b"Apache License" in document for document in text._law())


def test_docs_are_there_without_pydoc_data(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert sum(map(len, text._docs())) > 10_000


def test_a_source_without_text_says_so():
    with pytest.raises(RuntimeError, match="no text was found for source 'law'"):
        text._source("law", [b"", b"\0" * 100])


def test_a_document_that_appears_twice_is_kept_once():
    assert text._source("law", [b"a" * 80, b"b" * 90, b"a" * 80]).starts.tolist() == [0, 80, 170]


def test_shapes_and_dtypes(sources):
    (batch,) = _take(sources, 1, rows=5, length=17)
    found = {name: (array.shape, array.dtype.name) for name, array in batch.items()}
    assert found == {
        "tokens": ((5, 17), "int32"),
        "targets": ((5, 17), "int32"),
        "mask": ((5, 17), "float32"),
        "source": ((5,), "int32"),
    }


def test_same_seed_same_batches(sources):
    first, second = (_take(sources, 3, rows=4, length=32, seed=7) for _ in range(2))
    other = _take(sources, 3, rows=4, length=32, seed=8)
    for a, b in zip(first, second):
        assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(first[0]["tokens"], other[0]["tokens"])


def test_targets_are_the_next_byte_and_padding_is_masked():
    documents = [bytes(range(1, 101)), bytes(range(101, 201))]  # two documents of one source: rising bytes
    source = text._source("only", documents)
    padded = 0
    for batch in _take((source,), 50, rows=4, length=30):
        valid = batch["mask"] == 1
        assert set(np.unique(batch["mask"])) <= {0.0, 1.0}
        assert valid[:, 0].all()  # no row is empty
        assert (batch["targets"][valid] == batch["tokens"][valid] + 1).all()
        assert (batch["targets"][~valid] == 0).all()
        inside = (batch["tokens"] >= 101) == (batch["tokens"][:, :1] >= 101)
        assert inside[valid].all()  # a row never runs into the next document
        padded += int((~valid).any(axis=1).sum())
    assert padded > 0


def test_the_mixture_of_sources(sources):
    seen = np.concatenate([batch["source"] for batch in _take(sources, 200, rows=16, length=4)])
    assert np.abs(np.bincount(seen, minlength=3) / seen.size - [0.5, 0.3, 0.2]).max() < 0.05


@pytest.mark.parametrize("settings", [{"rows": 0, "length": 8}, {"rows": 8, "length": 0}])
def test_sizes_are_checked(sources, settings):
    with pytest.raises(ValueError, match="at least 1"):
        next(text.batches(sources, **settings))
