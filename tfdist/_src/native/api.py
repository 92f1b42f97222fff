"""ctypes declarations of the core's C API (csrc/c_api.h); a test compares the two files."""

from __future__ import annotations

import ctypes
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


class Setup(ctypes.Structure):
    """`tfd_setup`: how a communicator reaches its ranks."""

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
    ]


class Statistics(ctypes.Structure):
    """`tfd_statistics`: the traffic over the links."""

    _fields_ = [
        ("collectives", c_uint64),
        ("shared_bytes", c_uint64),
        ("sent_bytes", c_uint64),
        ("received_bytes", c_uint64),
        ("device_bytes", c_uint64),
    ]


class Activity(ctypes.Structure):
    """`tfd_activity`: what training has waited for."""

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
    """`tfd_link`: what the kernel counts of the connection to a rank."""

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
    """`tfd_codec`: a lossy encoding of float32."""

    _fields_ = [
        ("form", c_int),
        ("bits", c_int),
        ("stochastic", c_int),
        ("euclidean", c_int),
        ("unit", c_int),
        ("clip", c_float),
        ("block", c_int),
    ]


_COMMUNICATOR = (c_int64, c_char_p)  # communicator number, collective name
_COUNTS = POINTER(c_size_t)

# Function -> return type, argument types.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tfd_use_vector_unit": (c_int, (c_char_p,)),
    "tfd_vector_unit": (c_char_p, ()),
    "tfd_segment_bytes": (c_size_t, (c_int,)),
    "tfd_check_tls": (c_int, (c_char_p, c_char_p, c_char_p)),
    "tfd_check_gpu": (c_int, (c_int, c_char_p)),
    "tfd_create": (c_int, (POINTER(Setup), POINTER(c_int64))),
    "tfd_abort": (c_int, (c_int64, c_char_p)),
    "tfd_step_failed": (c_int, (c_int64, c_char_p)),
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
    """Sets the types of every function.

    Raises:
        AttributeError: the library lacks a function.
    """
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
