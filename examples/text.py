"""Real text that every machine with Python holds, as byte-level batches for a language model.

Three sources, so that the loss can be followed by source:

    code  the modules of Python's standard library
    docs  the documentation topics behind Python's `help()`
    law   licence texts: of Python, of the installed packages, of the system, of this repository

NumPy only. The same files and the same seed give the same batches.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

SOURCES = ("code", "docs", "law")
VOCABULARY = 256  # a token is a byte
_MIXTURE = (0.5, 0.3, 0.2)  # chance that a row comes from each source
_SHORTEST = 64  # bytes; a shorter document teaches nothing
_LARGEST = 1 << 20  # bytes; a longer one (generated tables) would crowd out the rest
_LICENCE = re.compile(r"(?i)(licen[cs]e|copying|copyright)[^/]*$")


@dataclasses.dataclass(frozen=True)
class Source:
    """The documents of one source, end to end.

    Attributes:
        name: One of `SOURCES`.
        data: uint8 `[bytes]`.
        starts: int64 `[documents + 1]`; document `i` is `data[starts[i] : starts[i + 1]]`.
    """

    name: str
    data: np.ndarray
    starts: np.ndarray


def _read(files: Iterable[Path]) -> Iterator[bytes]:
    for file in files:
        try:
            if file.is_file() and file.stat().st_size <= _LARGEST:
                yield file.read_bytes()
        except OSError:  # a file that may not be read, or that went away
            continue


def _code() -> Iterator[bytes]:
    library = Path(sysconfig.get_paths()["stdlib"])
    yield from _read(sorted(library.glob("*.py")))


def _docs() -> Iterator[bytes]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems ship it apart; the docstrings of the library read much the same
        modules = [(name, module) for name, module in sys.modules.items() if isinstance(module, types.ModuleType)]
        topics = {name: module.__doc__ or "" for name, module in modules}
    for name in sorted(topics):
        yield topics[name].encode()


def _law() -> Iterator[bytes]:
    paths = sysconfig.get_paths()
    library, packages = Path(paths["stdlib"]), Path(paths["purelib"])
    homes = (library, library.parent, library.parent.parent, Path(sys.base_prefix))
    yield from _read(home / name for home in homes for name in ("LICENSE.txt", "LICENSE"))
    in_packages = [*packages.glob("*.dist-info/*"), *packages.glob("*.dist-info/licenses/**/*")]
    yield from _read(sorted(path for path in in_packages if _LICENCE.search(path.name)))
    yield from _read(sorted(Path("/usr/share/common-licenses").glob("*")))
    yield from _read([Path(__file__).resolve().parent.parent / "LICENSE"])


def _source(name: str, documents: Iterable[bytes]) -> Source:
    kept = list(dict.fromkeys(text for text in documents if len(text) >= _SHORTEST and b"\0" not in text))
    if not kept:
        raise RuntimeError(f"no text was found for source {name!r}; is this Python installed with its library?")
    starts = np.cumsum([0, *map(len, kept)], dtype=np.int64)
    return Source(name, np.frombuffer(b"".join(kept), np.uint8), starts)


def load_sources() -> tuple[Source, ...]:
    """All three sources, in the order of `SOURCES`; a document that appears twice is kept once.

    >>> [source.name for source in load_sources()]
    ['code', 'docs', 'law']
    """
    return tuple(_source(name, read()) for name, read in zip(SOURCES, (_code, _docs, _law)))


def batches(sources: tuple[Source, ...], *, rows: int, length: int, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """An endless stream of batches.

    A row is a stretch of one document from a random place on. Where the document ends, the rest of the row is padding
    with mask 0.

    Args:
        sources: From `load_sources`.
        rows: Rows of a batch, B.
        length: Tokens of a row, T.
        seed: The same seed gives the same batches.

    Yields:
        `tokens` int32 [B, T], `targets` int32 [B, T] (the next byte), `mask` float32 [B, T], `source` int32 [B]
        (index into `sources`).

    >>> batch = next(batches(load_sources(), rows=4, length=32))
    >>> {name: array.shape for name, array in batch.items()}
    {'tokens': (4, 32), 'targets': (4, 32), 'mask': (4, 32), 'source': (4,)}
    """
    if rows < 1 or length < 1:
        raise ValueError(f"rows and length must be at least 1, got rows={rows}, length={length}")
    mixture = np.array(_MIXTURE[: len(sources)])
    random = np.random.default_rng(seed)
    while True:
        source = random.choice(len(sources), size=rows, p=mixture / mixture.sum())
        text = np.zeros((rows, length + 1), np.uint8)
        mask = np.zeros((rows, length), np.float32)
        for row, index in enumerate(source):
            stretch = _stretch(sources[index], random, length + 1)
            text[row, : stretch.size] = stretch
            mask[row, : stretch.size - 1] = 1.0
        tokens = text.astype(np.int32)
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask, "source": source.astype(np.int32)}


def _stretch(source: Source, random: np.random.Generator, size: int) -> np.ndarray:
    """Up to `size` bytes of one document, at least two, from a random place; every place is as likely."""
    place = int(random.integers(source.data.size - 1))
    document = int(np.searchsorted(source.starts, place, side="right"))
    end = int(source.starts[document])
    start = min(place, end - 2)
    return source.data[start : min(start + size, end)]
