"""A file of checksummed records, in the TFRecord framing that TensorBoard reads.

uint64 length | uint32 masked CRC-32C of length | data | uint32 masked CRC-32C of data      (little-endian)
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from probes_jax.host.run_folder import is_still_at, is_url

_PENDING_BYTES = 4 << 20  # what is kept in memory when the file cannot be written

try:
    import google_crc32c

    _crc32c: Callable[[bytes], int] = google_crc32c.value
except ImportError:  # the pure-Python checksum is right, and most of the cost of a record
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as _crc32c


def masked_crc32c(data: bytes) -> int:
    """CRC-32C, rotated and shifted so that a checksum of checksums is not degenerate.

    >>> hex(masked_crc32c(b"123456789"))
    '0xc78ab0e5'
    """
    crc = _crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """One record: length, data and their checksums."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))))


def gfile() -> Any:
    """TensorBoard's own file layer for `gs://` and the like (through fsspec); never TensorFlow's."""
    from tensorboard.compat.tensorflow_stub.io import gfile as module

    return module


class RecordFile:
    """Appends records to one new file.

    Records are kept in memory until `flush`. A flush that fails keeps what was not written for the next one, so a
    disk that was full for a while leaves no broken record behind; past 4 MiB new records are refused instead.

    Args:
        path: Local path or URL. The file must not exist.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._pending = bytearray()
        if is_url(path):
            self._file, self._raw = None, gfile().GFile(path, "wb")
        else:
            self._file, self._raw = open(path, "xb", buffering=0), None  # noqa: SIM115 - closed by `close`

    def append(self, data: bytes) -> None:
        """Adds one record.

        Raises:
            OSError: Nothing could be written for so long that the memory for waiting records is full.
        """
        if len(self._pending) >= _PENDING_BYTES:
            self.flush()
        self._pending += frame(data)

    def flush(self) -> None:
        """Hands everything to the operating system: it survives the death of the process."""
        if self._raw is not None:
            if self._pending:
                self._raw.write(bytes(self._pending))
                self._pending.clear()
                self._raw.flush()
            return
        assert self._file is not None
        if not is_still_at(self.path, self._file.fileno()):
            self._file.close()
            raise FileNotFoundError(
                f"event file {self.path} was deleted or moved while it was being written; a new one begins"
            )
        while self._pending:
            done = self._file.write(self._pending) or 0
            del self._pending[:done]

    def close(self) -> None:
        """Flushes and closes; closes even when the flush fails."""
        try:
            self.flush()
        finally:
            for file in (self._file, self._raw):
                if file is not None:
                    file.close()
