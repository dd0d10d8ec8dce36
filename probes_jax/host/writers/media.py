"""Arrays as the encoded tensors of TensorBoard's image, audio and histogram plugins, on NumPy and zlib alone."""

from __future__ import annotations

import io
import struct
import wave
import zlib

import numpy as np

_PNG_COLOR = {1: 0, 2: 4, 3: 2, 4: 6}  # channels -> PNG colour type


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def encode_png(pixels: np.ndarray) -> bytes:
    """PNG of uint8 pixels `[height, width, channels]`, 1 to 4 channels (grey, grey + alpha, RGB, RGBA)."""
    height, width, channels = pixels.shape
    if channels not in _PNG_COLOR:
        raise ValueError(f"image has {channels} channels; a PNG has 1 to 4, channels are the last axis")
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOR[channels], 0, 0, 0)
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row starts with filter type 0
    rows[:, 1:] = pixels.reshape(height, width * channels)
    data = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes())) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


def image_strings(name: str, images: np.ndarray) -> np.ndarray:
    """The image plugin's tensor: width, height, then one PNG each.

    Args:
        name: Name of the summary, for errors.
        images: `[N, H, W, C]` or `[H, W, C]`; uint8, bool, or floats in [0, 1] (clipped; NaN is black).
    """
    if images.ndim == 3:
        images = images[None]
    if images.ndim != 4:
        raise ValueError(f"image {name!r} must have shape [N, H, W, C] or [H, W, C], got {images.shape}")
    if images.dtype == np.bool_:
        images = images.astype(np.uint8) * 255
    elif images.dtype.kind == "f":
        images = (np.clip(np.nan_to_num(images, nan=0.0), 0.0, 1.0) * 255 + 0.5).astype(np.uint8)
    elif images.dtype != np.uint8:
        raise TypeError(f"image {name!r} must be uint8, bool or a float in [0, 1], got {images.dtype}")
    size = [str(images.shape[2]).encode(), str(images.shape[1]).encode()]
    return np.array(size + [encode_png(image) for image in images], dtype=object)


def encode_wav(samples: np.ndarray, sample_rate: int) -> bytes:
    """16-bit WAV of float samples `[time, channels]` in [-1, 1] (clipped; NaN is silence)."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        scaled = np.clip(np.nan_to_num(samples, nan=0.0), -1.0, 1.0) * 32767.0
        file.writeframes(np.rint(scaled).astype("<i2").tobytes())
    return out.getvalue()


def audio_strings(name: str, audios: np.ndarray, sample_rate: int) -> np.ndarray:
    """The audio plugin's tensor `[N, 2]`: WAV and an empty label each. `audios` is `[N, T, C]`."""
    if audios.ndim != 3:
        raise ValueError(f"audio {name!r} must have shape [N, T, C], got {audios.shape}")
    if audios.dtype.kind != "f":
        raise TypeError(f"audio {name!r} must be floats in [-1, 1], got {audios.dtype}")
    return np.array([[encode_wav(audio, sample_rate), b""] for audio in audios], dtype=object).reshape(-1, 2)


def histogram_buckets(values: np.ndarray, buckets: int | None = None) -> np.ndarray:
    """The histogram plugin's tensor: rows of (left edge, right edge, count), float64 `[buckets, 3]`.

    Args:
        values: Finite numbers of any shape. None at all give no bucket, equal ones a single bucket.
        buckets: Number of equally wide buckets, default 30.
    """
    values = np.asarray(values, np.float64).ravel()
    if values.size == 0:
        return np.zeros((0, 3))
    low, high = values.min(), values.max()
    if low == high:
        return np.array([[low, high, values.size]])
    counts, edges = np.histogram(values, bins=buckets or 30, range=(low, high))
    return np.stack([edges[:-1], edges[1:], counts.astype(np.float64)], axis=1)
