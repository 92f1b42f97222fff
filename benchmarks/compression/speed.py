"""Measures how fast a codec encodes and decodes, on one core and without a network."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.comm.device_communicator import open_local_communicators
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.compression.codecs.codec import HierarchicalCodec
from tfdist._src.compression.codecs.sparsifiers import Sparsifier, scatter
from tfdist._src.compression.transport import Gradient, State
from tfdist._src.options import Options
from tfdist.compression import Codec, Quantizer

SHAPE = (1024, 2048)
VALUES = 1 << 21
REPETITIONS = 40
DEVIATION = 4e-4
"""The standard deviation of the encoded values. It is typical of gradients: about one value in a
hundred exceeds the default threshold of the codec `threshold`."""


@dataclass(frozen=True)
class Speed:
    """The speed of a codec, in 10^9 bytes of float32 values per second; None if unknown."""

    encode_gbs: float | None = None
    decode_gbs: float | None = None


def measure_speed(codec: Codec | None) -> Speed:
    """Measures how fast a codec encodes and decodes 8 MiB of normally distributed values.

    Args:
        codec: the codec; None for no compression.

    Returns:
        The highest speed of several repetitions, because other programs slow down some of them.
        Some codecs sum the encoded values of all hosts and decode the sum, in one operation. For
        these codecs, `encode_gbs` includes the time to decode, and `decode_gbs` is None. Without
        compression, both are None.
    """
    if isinstance(codec, Quantizer):
        return _of_quantizer(codec)
    if isinstance(codec, HierarchicalCodec):
        # A worker also has one thread. This must precede the first operation, because TensorFlow
        # then creates its threads.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        (alone,) = open_local_communicators("alone", ["alone"], Options.from_environment())
        with closing(alone):
            return _of_carried(codec, alone)
    return Speed()


def _of_carried(codec: HierarchicalCodec, alone: CoreCommunicator) -> Speed:
    state = State()
    for name, shape in codec.kept(SHAPE).items():
        state.make(name, 0, shape, codec.first, alone.device)
    value = tf.random.stateless_normal(SHAPE, [0, 0], stddev=DEVIATION)
    # The sign alternates, because with the same gradient in every step, the error of the error
    # feedback would grow in every step.
    values = itertools.cycle((value, -value))
    step = tf.constant(0, tf.int64)

    @tf.function  # as in training
    def encode(value: tf.Tensor) -> tf.Tensor:
        gradient = Gradient(value, 0, state.of(0))
        if isinstance(codec, Sparsifier):
            return codec._select([gradient], step, hosts=1)
        (total,) = codec._sum_of_hosts(alone, [gradient], step)
        return total

    encoded = encode(value)
    encode_gbs = _gbs(value.numpy(), lambda: encode(next(values)))
    if isinstance(codec, Sparsifier):
        return Speed(encode_gbs, _gbs(value.numpy(), lambda: scatter(encoded, [SHAPE])))
    return Speed(encode_gbs)


def _of_quantizer(codec: Quantizer) -> Speed:
    values = np.random.default_rng(0).standard_normal(VALUES, np.float32)
    error = np.zeros_like(values) if codec.error_feedback else None
    encoding = codec._encoding
    encoded = encoding.encode(values, error)
    return Speed(
        _gbs(values, lambda: encoding.encode(values, error)),
        _gbs(values, lambda: encoding.decode(encoded, VALUES)),
    )


def _gbs(values: np.ndarray[Any, Any], work: Callable[[], Any]) -> float:
    work()  # The first run allocates memory.
    seconds = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return values.nbytes / min(seconds) / 1e9
