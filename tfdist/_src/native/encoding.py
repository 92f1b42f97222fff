"""The lossy float32 encodings of the native core."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any

import numpy as np

from tfdist._src import native
from tfdist._src.native.api import Codec

# As in csrc/codec/codec.h.
HALF, BFLOAT16, FLOAT8, LEVELS, POWERS, TWO_MEANS, SIGNS = range(7)
_BITS = {HALF: 16, BFLOAT16: 16, FLOAT8: 8, POWERS: 8, TWO_MEANS: 1, SIGNS: 1}
_HEADER_BITS = {BFLOAT16: 0, TWO_MEANS: 64}


@dataclasses.dataclass(frozen=True)
class Encoding:
    """An encoding that the core applies block by block.

    A block with a non-finite value decodes to NaN.

    Attributes:
        form: one of the constants of this module.
        bits: bits per value of `LEVELS`, 2, 4 or 8: a sign and one of 2^(bits - 1) even steps
            from 0.
        stochastic: rounds `LEVELS` up or down at random, unbiased, instead of to the nearest.
        euclidean: scales `LEVELS` so that the last is the block's norm, not its largest magnitude.
        unit: decodes `SIGNS` (and their sums) to 1 and -1, not to the block's mean magnitude.
        clip: clips `LEVELS` at this many standard deviations from zero; 0 disables clipping.
        block: the number of values that share a header, a multiple of 8 up to 4096.
    """

    form: int
    bits: int = 8
    stochastic: bool = False
    euclidean: bool = False
    unit: bool = False
    clip: float = 0.0
    block: int = 256

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"`bits` must be 2, 4 or 8 bits per value. Received: {self.bits!r}.")
        if not 0 < self.block <= 4096 or self.block % 8:
            raise ValueError(
                f"`block` must be a positive multiple of 8, at most 4096. Received: {self.block!r}."
            )
        if not 0 <= self.clip < math.inf:
            raise ValueError(f"`clip` must be finite and >= 0. Received: {self.clip!r}.")

    @property
    def bits_per_value(self) -> float:
        """The encoded size per value, including its share of the header."""
        bits = self.bits if self.form == LEVELS else _BITS[self.form]
        return bits + _HEADER_BITS.get(self.form, 32) / self.block

    def bytes(self, count: int) -> int:
        """The encoded size of `count` values.

        Raises:
            ValueError: the encoding is invalid.
        """
        size = ctypes.c_size_t()
        _check(_core().tfd_encoded_bytes(self._codec(), count, ctypes.byref(size)))
        return size.value

    def encode(
        self, values: np.ndarray[Any, Any], error: np.ndarray[Any, Any] | None = None, seed: int = 0
    ) -> np.ndarray[Any, Any]:
        """Encodes float32 values.

        Args:
            values: float32, of any shape.
            error: float32 of the same shape, added to the values; on return, the encoding error.
            seed: 32-bit seed of the random rounding.

        Returns:
            The encoded bytes, uint8.

        Raises:
            ValueError: the encoding or an array is invalid.
        """
        for array in (values, error):
            if array is not None and (
                array.dtype != np.float32 or not array.flags.c_contiguous or not array.flags.aligned
            ):
                raise ValueError(
                    f"Arrays must be contiguous float32. Received: {array.dtype}. "
                    "Use np.ascontiguousarray(values, np.float32)."
                )
        if error is not None and (error.shape != values.shape or not error.flags.writeable):
            raise ValueError(
                f"`error` must be a writable array of shape {values.shape}, like `values`. "
                f"Received: {error.shape}."
            )
        encoded = np.empty(self.bytes(values.size), np.uint8)
        lost = None if error is None else error.ctypes.data
        _check(
            _core().tfd_encode(
                self._codec(), values.ctypes.data, lost, values.size, encoded.ctypes.data, seed
            )
        )
        return encoded

    def decode(self, encoded: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
        """Decodes `count` float32 values.

        Raises:
            ValueError: the encoding is invalid, or the number of bytes does not fit `count`.
        """
        encoded = np.ascontiguousarray(encoded, np.uint8)
        if encoded.size != self.bytes(count):
            raise ValueError(
                f"{count} values are encoded in {self.bytes(count)} bytes. "
                f"Received: {encoded.size} bytes."
            )
        values = np.empty(count, np.float32)
        _check(_core().tfd_decode(self._codec(), encoded.ctypes.data, count, values.ctypes.data))
        return values

    def _codec(self) -> Codec:
        return Codec(*dataclasses.astuple(self))


def _core() -> Any:
    return native.load().library


def _check(code: int) -> None:
    if code:
        raise ValueError(_core().tfd_error().decode(errors="replace"))
