"""Declares the core's C API for ctypes, and wraps its lossy encodings."""

import ctypes
import dataclasses
import math
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

import numpy as np

from tfdist._src import native


class Setup(ctypes.Structure):
    """The C structure `tfd_setup`: the settings and connections of a communicator."""

    _fields_ = [
        ("name", c_char_p),
        ("rank", c_int),
        ("size", c_int),
        ("ranks", POINTER(c_char_p)),
        ("hosts", POINTER(c_int)),
        ("control", POINTER(c_int)),
        ("data", POINTER(c_int)),
        ("segment", c_int),
        ("segment_bytes", c_size_t),
        ("silence_warning_seconds", c_double),
        ("silence_timeout_seconds", c_double),
        ("stall_seconds", c_double),
        ("timeout_seconds", c_double),
        ("start_seconds", c_double),
        ("algorithm", c_char_p),
        ("tls_certificate", c_char_p),
        ("tls_key", c_char_p),
        ("tls_ca", c_char_p),
        ("tls_secret", c_char_p),
        ("gpus", c_int),
        ("gpu_numbers", POINTER(c_int)),
        ("gpu_kernels", POINTER(c_char_p)),
        ("cuda_library", c_char_p),
        ("nccl_library", c_char_p),
        ("device_algorithm", c_char_p),
        ("device_buffer_bytes", c_size_t),
        ("news", c_int),
    ]


class Statistics(ctypes.Structure):
    """The C structure `tfd_statistics`: the traffic of a communicator."""

    _fields_ = [
        ("collectives", c_uint64),
        ("shared_bytes", c_uint64),
        ("sent_bytes", c_uint64),
        ("received_bytes", c_uint64),
        ("device_bytes", c_uint64),
    ]


class Activity(ctypes.Structure):
    """The C structure `tfd_activity`: counts of steps and operations, and times of waits."""

    _fields_ = [
        ("steps", c_uint64),
        ("input_ns", c_int64),
        ("input_since_ns", c_int64),
        ("workers_ns", c_int64),
        ("network_ns", c_int64),
        ("all_reduce", c_uint64),
        ("reduce_scatter", c_uint64),
        ("all_gather", c_uint64),
        ("broadcast", c_uint64),
        ("all_to_all", c_uint64),
        ("barrier", c_uint64),
        ("send", c_uint64),
        ("receive", c_uint64),
        ("bus_bytes", c_double),
        ("bus_ns", c_int64),
    ]


class Link(ctypes.Structure):
    """The C structure `tfd_link`: the operating system's statistics about a TCP connection."""

    _fields_ = [
        ("acknowledged_bytes", c_uint64),
        ("busy_us", c_uint64),
        ("pending_bytes", c_uint64),
        ("bytes_per_second", c_uint64),
        ("round_trip_us", c_uint32),
        ("retransmits", c_uint32),
        ("silent_ms", c_uint32),
    ]


class Codec(ctypes.Structure):
    """The C structure `tfd_codec`: a lossy encoding of float32 values."""

    _fields_ = [
        ("form", c_int),
        ("bits", c_int),
        ("stochastic", c_int),
        ("euclidean", c_int),
        ("unit", c_int),
        ("clip", c_float),
        ("block", c_int),
    ]


# the number of the communicator, and the name of the collective
_COMMUNICATOR = (c_int64, c_char_p)
_COUNTS = POINTER(c_size_t)

# For each function of the C API, the type of its result and the types of its arguments.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tfd_use_vector_unit": (c_int, (c_char_p,)),
    "tfd_vector_unit": (c_char_p, ()),
    "tfd_segment_bytes": (c_size_t, (c_int,)),
    "tfd_check_tls": (c_int, (c_char_p, c_char_p, c_char_p)),
    "tfd_check_gpu": (c_int, (c_int, c_char_p)),
    "tfd_create": (c_int, (POINTER(Setup), POINTER(c_int64))),
    "tfd_abort": (c_int, (c_int64, c_char_p, c_char_p, c_char_p)),
    "tfd_step_failed": (c_int, (c_int64, c_char_p, c_char_p, c_char_p)),
    "tfd_cause": (c_char_p, (c_int64,)),
    "tfd_close": (c_int, (c_int64,)),
    "tfd_close_all": (c_int, ()),
    "tfd_error": (c_char_p, ()),
    "tfd_get_statistics": (c_int, (c_int64, POINTER(Statistics))),
    "tfd_get_activity": (None, (POINTER(Activity),)),
    "tfd_get_links": (c_int, (c_int64, POINTER(Link))),
    "tfd_record": (None, (c_int,)),
    "tfd_record_spans": (None, (c_int,)),
    "tfd_add_span": (None, (c_char_p, c_char_p, c_int64, c_int64)),
    "tfd_spans": (c_char_p, ()),
    "tfd_clock": (c_int64, ()),
    "tfd_state": (c_char_p, (c_size_t, c_int64)),
    "tfd_flight_start": (c_int, (c_char_p, c_char_p, c_int)),
    "tfd_flight_move": (None, (c_char_p, c_char_p)),
    "tfd_flight_ask": (None, (c_char_p, c_char_p, c_char_p)),
    "tfd_flight_stalled": (c_char_p, ()),
    "tfd_flight_set_session": (None, (c_char_p,)),
    "tfd_flight_stacks_wanted": (c_int, ()),
    "tfd_flight_give_stacks": (None, (c_char_p,)),
    "tfd_flight_flush": (None, (c_double,)),
    "tfd_all_reduce": (c_int, (*_COMMUNICATOR, c_void_p, c_void_p, c_size_t, c_int, c_int)),
    "tfd_reduce_scatter": (c_int, (*_COMMUNICATOR, c_void_p, c_void_p, c_size_t, c_int, c_int)),
    "tfd_all_gather": (c_int, (*_COMMUNICATOR, c_void_p, c_void_p, _COUNTS, c_int)),
    "tfd_broadcast": (c_int, (*_COMMUNICATOR, c_void_p, c_size_t, c_int, c_int)),
    "tfd_all_to_all": (c_int, (*_COMMUNICATOR, c_void_p, _COUNTS, c_void_p, _COUNTS, c_int)),
    "tfd_send": (c_int, (*_COMMUNICATOR, c_void_p, c_size_t, c_int, c_int)),
    "tfd_receive": (c_int, (*_COMMUNICATOR, c_void_p, c_size_t, c_int, c_int)),
    "tfd_barrier": (c_int, _COMMUNICATOR),
    "tfd_replay_create": (c_int, (POINTER(c_int64),)),
    "tfd_replay_request": (c_int, (c_int64,)),
    "tfd_replay_given": (c_int, (c_int64, POINTER(c_int64))),
    "tfd_replay_keep_rows": (c_int, (c_int64, c_int64, c_int64)),
    "tfd_replay_batch": (c_int, (c_int64, c_int64, POINTER(c_int64), POINTER(c_int64))),
    "tfd_replay_want": (c_int, (c_int64, c_int64)),
    "tfd_replay_give_whole": (c_int, (c_int64, c_int)),
    "tfd_replay_rows": (c_int, (c_int64, c_int, *[POINTER(c_int64)] * 4)),
    "tfd_replay_close": (c_int, (c_int64,)),
    "tfd_encoded_bytes": (c_int, (POINTER(Codec), c_size_t, POINTER(c_size_t))),
    "tfd_encode": (c_int, (POINTER(Codec), c_void_p, c_void_p, c_size_t, c_void_p, c_uint32)),
    "tfd_decode": (c_int, (POINTER(Codec), c_void_p, c_size_t, c_void_p)),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the argument and result types of all functions of the C API.

    Raises:
        AttributeError: the library does not contain one of the functions.
    """
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


# The values of the enumeration `Encoding` in csrc/codec/codec.h.
HALF, BFLOAT16, FLOAT8, LEVELS, POWERS, TWO_MEANS, SIGNS = range(7)
_BITS = {HALF: 16, BFLOAT16: 16, FLOAT8: 8, POWERS: 8, TWO_MEANS: 1, SIGNS: 1}
_HEADER_BITS = {BFLOAT16: 0, TWO_MEANS: 64}


@dataclasses.dataclass(frozen=True)
class Encoding:
    """A lossy encoding of float32 values in the core. Each block of values is encoded separately.

    If a block contains a value that is not finite, all its values are decoded as NaN.

    Attributes:
        form: the kind of encoding: one of the constants of this module.
        bits: the number of bits per value for `LEVELS`: 2, 4 or 8. A value is encoded as its sign
            and one of `2^(bits - 1)` levels, which divide the range from 0 to the scale of the
            block evenly.
        stochastic: for `LEVELS`, whether to round up or down at random, so that the expected value
            is exact. Otherwise, values are rounded to the nearest level.
        euclidean: for `LEVELS`, whether the scale of a block is its Euclidean norm. Otherwise, the
            scale is the largest magnitude in the block.
        unit: for `SIGNS`, whether values and sums are decoded as 1 or -1. Otherwise, the magnitude
            of decoded values is the mean magnitude of the block.
        clip: for `LEVELS`, the largest magnitude that is not clipped, in standard deviations of the
            block about zero. 0 disables clipping.
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
        """The number of bits per encoded value, including a share of the block's header."""
        bits = self.bits if self.form == LEVELS else _BITS[self.form]
        return bits + _HEADER_BITS.get(self.form, 32) / self.block

    def bytes(self, count: int) -> int:
        """Returns the number of bytes in which `count` values are encoded.

        Raises:
            ValueError: the settings of the encoding are invalid.
        """
        size = ctypes.c_size_t()
        _check(_core().tfd_encoded_bytes(self._codec(), count, ctypes.byref(size)))
        return size.value

    def encode(
        self, values: np.ndarray[Any, Any], error: np.ndarray[Any, Any] | None = None, seed: int = 0
    ) -> np.ndarray[Any, Any]:
        """Encodes float32 values.

        Args:
            values: a float32 array of any shape.
            error: a float32 array of the same shape, for error feedback. It is added to the values
                before they are encoded. Afterward, it contains the encoding error.
            seed: the seed for random rounding, an integer of 32 bits.

        Returns:
            The encoded values, as a uint8 array.

        Raises:
            ValueError: the settings of the encoding or an array are invalid.
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
            ValueError: the settings of the encoding are invalid, or `encoded` has the wrong size.
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
