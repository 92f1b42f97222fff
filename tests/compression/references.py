"""The quantizers as their papers have them, in NumPy, one block at a time.

Those that round at random are given as the value below, the value above, and the probability of
the latter.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


def blocks(values: Array, size: int) -> list[Array]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def fp16(x: Array) -> Array:
    if not x.any():
        return x
    scale = 2.0 ** (np.floor(np.log2(np.abs(x).max().astype(np.float64))) - 14)
    return (x / scale).astype(np.float16).astype(np.float64) * scale


def bf16(x: Array) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def fp8(x: Array) -> Array:
    scale = np.abs(x).max() / np.float32(448)
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def int8(x: Array) -> Array:
    scale = np.abs(x).max() / np.float64(127)
    return np.sign(x) * np.floor(np.abs(x) / scale + 0.5) * scale


def onebit(x: Array) -> Array:
    negative = x < 0
    means = [x[side].mean() if side.any() else 0.0 for side in (negative, ~negative)]
    return np.where(negative, *means)


def ef_signsgd(x: Array) -> Array:
    return np.where(x < 0, -1.0, 1.0) * np.abs(x).mean()


def signsgd(x: Array) -> Array:
    return np.where(x < 0, -1.0, 1.0)


EXACT = {
    "fp16": fp16,
    "bf16": bf16,
    "fp8": fp8,
    "int8": int8,
    "onebit": onebit,
    "ef_signsgd": ef_signsgd,
    "signsgd": signsgd,
}


def levels(x: Array, scale: float, count: int) -> tuple[Array, Array, Array]:
    position = np.abs(x) / scale * count
    below = np.floor(position)
    step = np.sign(x) * scale / count
    return below * step, np.minimum(below + 1, count) * step, position - below


def qsgd(x: Array, bits: int = 8) -> tuple[Array, Array, Array]:
    return levels(x, np.linalg.norm(x.astype(np.float64)), 2 ** (bits - 1) - 1)


def terngrad(x: Array, clip: float = 2.5) -> tuple[Array, Array, Array]:
    limit = clip * np.sqrt(np.mean(x.astype(np.float64) ** 2))
    clipped = np.clip(x, -limit, limit)
    return levels(clipped, np.abs(clipped).max(), 1)


def natural(x: Array) -> tuple[Array, Array, Array]:
    below = 2.0 ** np.floor(np.log2(np.abs(x)))
    return np.sign(x) * below, 2 * np.sign(x) * below, np.abs(x) / below - 1


def int8_stochastic(x: Array) -> tuple[Array, Array, Array]:
    return levels(x, np.abs(x).max(), 127)


RANDOM = {
    "qsgd": qsgd,
    "terngrad": terngrad,
    "natural": natural,
}
