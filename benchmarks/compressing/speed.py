"""How fast a codec encodes and decodes, on one core and without a network."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from tfdist.compression import Codec, Quantizer

VALUES = 1 << 21
REPETITIONS = 15


@dataclass(frozen=True)
class Speed:
    """Bandwidths in 10^9 bytes of float32 per second; None where they are not known."""

    encode_gbs: float | None = None
    decode_gbs: float | None = None


def measure_speed(codec: Codec | None) -> Speed:
    """Encodes and decodes 8 MiB of normal values, as training does it.

    Args:
        codec: None where there is nothing to encode.

    Returns:
        The medians of some repetitions; unknown for a codec that does not encode value by value.
    """
    return _of_quantizer(codec) if isinstance(codec, Quantizer) else Speed()


def _of_quantizer(codec: Quantizer) -> Speed:
    values = np.random.default_rng(0).standard_normal(VALUES, np.float32)
    error = np.zeros_like(values) if codec.error_feedback else None
    encoding = codec.encoding
    encoded = encoding.encode(values, error)
    return Speed(
        _gbs(values, lambda: encoding.encode(values, error)),
        _gbs(values, lambda: encoding.decode(encoded, VALUES)),
    )


def _gbs(values: np.ndarray[Any, Any], work: Callable[[], Any]) -> float:
    work()  # The first one makes the memory.
    seconds = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return values.nbytes / median(seconds) / 1e9
