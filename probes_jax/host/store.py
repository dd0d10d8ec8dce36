"""What a run's store is made of: zarr arrays, and JSON entries.

The only file that knows tensorstore, so local folders, `gs://` and `s3://` are the same code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from probes_jax.host import strict_json
from probes_jax.host.run_folder import RunFolder, is_url
from probes_jax.host.series_block import ABSENT_BITS, NO_STEP, Block

_CHUNK_COLUMNS = 512  # a reader of one metric reads chunks this wide


class Store:
    """JSON entries and arrays under one root.

    Args:
        root: Local path or URL of the run's folder.
        context: A shared `tensorstore.Context`; needed only to reach one `memory://` store twice.
    """

    def __init__(self, root: str, context: Any = None) -> None:
        self.root = RunFolder(root if is_url(root) else os.path.abspath(root)).root
        self.context = context or ts.Context()
        self._kv = ts.KvStore.open(self.place(""), context=self.context).result()

    def place(self, path: str) -> Any:
        """The tensorstore spec of a path under the root."""
        if is_url(self.root):
            return f"{self.root.rstrip('/')}/{path}"
        return {"driver": "file", "path": f"{self.root}/{path}"}

    def read(self, key: str) -> Any:
        """The entry of a key, or None."""
        found = self._kv.read(key).result()
        return strict_json.loads(found.value) if found.state == "value" else None

    def has(self, key: str) -> bool:
        """Whether there is anything under a key."""
        return self._kv.read(key).result().state == "value"

    def write(self, key: str, value: Any) -> None:
        """Writes an entry; readers see the old one or the new one."""
        self._kv.write(key, strict_json.dumps(value)).result()

    def create(self, key: str, value: Any) -> bool:
        """Writes an entry unless there is one already; whether it did."""
        found = self._kv.read(key).result()
        if found.state == "value":
            return False
        written = self._kv.write(key, strict_json.dumps(value), if_equal=found.stamp.generation).result()
        return bool(written.generation)

    def keys(self, prefix: str) -> list[str]:
        """Keys under a prefix that ends with `/`, sorted."""
        return sorted(prefix + key.decode() for key in (self._kv / prefix).list().result())


def _metadata(dtype: str, fill: Any, rows: int, columns: int | None) -> dict[str, Any]:
    shape, chunk = ([0], [rows]) if columns is None else ([0, columns], [rows, min(columns, _CHUNK_COLUMNS)])
    blosc = {"cname": "zstd", "clevel": 3, "shuffle": "shuffle", "typesize": 8, "blocksize": 0}
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "blosc", "configuration": blosc}]
    if columns is not None:  # a column's neighbours in time are alike, and compress
        codecs.insert(0, {"name": "transpose", "configuration": {"order": [1, 0]}})
    return {
        "shape": shape,
        "data_type": dtype,
        "fill_value": fill,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": codecs,
    }


class SeriesArrays:
    """The arrays of one series: `step` `[T]`, `wall_time` `[T]`, `values` `[T, columns]`, all in blocks of rows.

    `T` grows by whole blocks and a block is written whole, so no write has to read first. `step` is written last: a
    row counts once it has a step, so a reader never sees half a row.
    """

    def __init__(self, store: Store, path: str, metadata: Mapping[str, Any] | None = None) -> None:
        """Opens the arrays under `path`; with `metadata`, makes what is not there yet."""
        opening = {}
        for name in ("values", "wall_time", "step"):
            spec = {"driver": "zarr3", "kvstore": store.place(f"{path}/{name}/"), "open": True}
            if metadata is not None:
                spec |= {"metadata": metadata[name], "create": True}
            opening[name] = ts.open(spec, context=store.context)
        self._arrays = {name: future.result() for name, future in opening.items()}

    @classmethod
    def create(cls, store: Store, path: str, columns: int, rows: int) -> SeriesArrays:
        """Makes the arrays of a series with blocks of `rows` rows."""
        metadata = {
            "values": _metadata("float64", f"0x{ABSENT_BITS:016x}", rows, columns),
            "wall_time": _metadata("float64", "NaN", rows, None),
            "step": _metadata("int64", NO_STEP, rows, None),
        }
        return cls(store, path, metadata)

    def write(self, block: Block) -> None:
        """Writes a block, in place of what was written of it before."""
        end = block.base + block.rows
        first = [self._write(name, block.base, end, getattr(block, name)) for name in ("values", "wall_time")]
        for future in first:
            future.result()
        self._write("step", block.base, end, block.step).result()

    def _write(self, name: str, base: int, end: int, data: np.ndarray) -> Any:
        array = self._arrays[name]
        if array.shape[0] < end:
            array = array.resize(exclusive_max=[end, *array.shape[1:]], expand_only=True).result()
            self._arrays[name] = array
        return array[base:end].write(data)

    def last_step(self) -> int | None:
        """The step of the last row that was written; steps rise within a series."""
        array = self._arrays["step"]
        rows, end = array.chunk_layout.read_chunk.shape[0], array.shape[0]
        for base in range(end - rows, -rows, -rows):
            steps = array[max(base, 0) : base + rows].read().result()
            if (steps != NO_STEP).any():
                return int(steps.max())
        return None

    def blocks(self) -> list[tuple[int, int]]:
        """First row of each block, and the row behind its last."""
        height = min(array.shape[0] for array in self._arrays.values())  # they may have been opened while growing
        rows = self._arrays["step"].chunk_layout.read_chunk.shape[0]
        return [(base, min(base + rows, height)) for base in range(0, height, rows)]

    def read(self, columns: Sequence[int], first: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What was written of the rows from `first` to before `end`.

        Returns:
            Steps `[T]`, wall times `[T]`, stored values `[T, len(columns)]`.
        """
        steps = self._arrays["step"][first:end].read().result()
        rows = np.flatnonzero(steps != NO_STEP)
        end = first + int(rows[-1]) + 1 if rows.size else first
        wall_time = self._arrays["wall_time"][first:end].read()
        values = self._arrays["values"][first:end].oindex[:, list(columns)].read()
        return steps[rows], wall_time.result()[rows], values.result()[rows]
