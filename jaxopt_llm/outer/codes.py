"""Encoding of a vector of float32 values as bytes, in NumPy: exactly, in bfloat16, or as blocks of codes.

The codes are those of parallel/blocks.py; a test compares them. In a compiled program, XLA may round a scale otherwise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from jaxopt_llm.core.block_format import BLOCK_SIZES, MAX_CODES, Bits

Format = Literal["exact", "bfloat16", "int8", "int4"]
FORMATS = get_args(Format)
BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
_CHUNK = 2**22  # values that are encoded at a time, for the memory of what is computed in between


def is_finite(vector: np.ndarray) -> bool:
    """Return whether all values of a vector are finite."""
    return all(np.isfinite(vector[start : start + _CHUNK]).all() for start in range(0, vector.size, _CHUNK))


def find_block_size(last: int) -> int:
    """Return the largest block size that divides the last dimension of an array; 0 if there is none."""
    return next((values for values in BLOCK_SIZES if last % values == 0), 0)


@dataclass(frozen=True)
class Layout:
    """Layout of a vector.

    segments: (number of values, block size) of each part, in order. A part with block size 0 has no codes.
    """

    segments: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, segments: Any) -> "Layout":
        """Return the layout from its JSON.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(segments, list) or not all(isinstance(each, list) and len(each) == 2 for each in segments):
            raise ValueError("not a layout")
        for count, values in segments:
            is_whole = type(count) is int and type(values) is int and count > 0
            if not is_whole or values not in (0, *BLOCK_SIZES) or (values and count % values):
                raise ValueError("not a layout")
        return cls(tuple((count, values) for count, values in segments))

    @property
    def size(self) -> int:
        return sum(count for count, _ in self.segments)

    def count_bytes(self, form: str) -> int:
        """Return the bytes of an encoded vector."""
        if form not in BITS:
            return (2 if form == "bfloat16" else 4) * self.size
        bits = BITS[form]
        return sum(
            count * bits // 8 + 4 * (count // values) if values else 4 * count for count, values in self.segments
        )

    def encode(self, vector: np.ndarray, form: str) -> np.ndarray:
        """Return the bytes of a vector, uint8. Values are rounded to the nearest code of their block."""
        if form == "exact":
            return np.ascontiguousarray(vector, "<f4").view(np.uint8)
        if form == "bfloat16":
            parts = [_to_bfloat16(vector[start:end]) for start, end, _ in self._chunks()]
            return np.concatenate([np.empty(0, np.uint8), *(part.view(np.uint8) for part in parts)])
        bits = BITS[form]
        parts = [
            part
            for start, end, values in self._chunks()
            for part in (_encode(vector[start:end], values, bits) if values else (vector[start:end].astype("<f4"),))
        ]
        return np.concatenate([np.empty(0, np.uint8), *(part.view(np.uint8) for part in parts)])

    def decode(self, data: np.ndarray, form: str) -> np.ndarray:
        """Return the vector, float32, of what `encode` returned."""
        if form == "exact":
            return data.view("<f4").astype(np.float32)
        if form == "bfloat16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        bits, vector, at = BITS[form], np.empty(self.size, np.float32), 0

        def take(count: int) -> np.ndarray:
            nonlocal at
            at += count
            return data[at - count : at]

        for start, end, values in self._chunks():
            if values:
                codes = take((end - start) * bits // 8)
                vector[start:end] = _decode(codes, take(4 * ((end - start) // values)), bits)
            else:
                vector[start:end] = take(4 * (end - start)).view("<f4")
        return vector

    def _chunks(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first value, the end and the block size of parts that are encoded one after another."""
        at = 0
        for count, values in self.segments:
            for start in range(at, at + count, _CHUNK):
                yield start, min(start + _CHUNK, at + count), values
            at += count


def _to_bfloat16(vector: np.ndarray) -> np.ndarray:
    """Round float32 values to the upper half of their bits, ties to even."""
    bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(vector), 0x7FC0, rounded).astype("<u2")


def _encode(values_: np.ndarray, values: int, bits: Bits) -> Sequence[np.ndarray]:
    blocks = values_.reshape(-1, values)
    with np.errstate(invalid="ignore", over="ignore"):  # a block that is not finite becomes NaN
        scales = np.max(np.abs(blocks), axis=-1) / np.float32(MAX_CODES[bits])
        codes = np.rint(blocks / np.where(scales > 0, scales, np.float32(1))[:, None])
        scales = np.where(np.isfinite(scales), scales, np.float32(np.nan)).astype("<f4")
        if bits == 8:
            return codes.astype(np.int8).reshape(-1), scales
        low, high = np.split((codes + MAX_CODES[4]).astype(np.uint8), 2, axis=-1)
    return (low | (high << 4)).reshape(-1), scales


def _decode(data: np.ndarray, scales: np.ndarray, bits: Bits) -> np.ndarray:
    factors = scales.view("<f4")
    if bits == 8:
        blocks = data.view(np.int8).reshape(len(factors), -1).astype(np.float32)
    else:
        packed = data.reshape(len(factors), -1)
        blocks = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32) - np.float32(MAX_CODES[4])
    decoded: np.ndarray = (blocks * factors[:, None]).reshape(-1)
    return decoded
