"""Measures how fast torch encodes gradients in one bit per value, with error feedback.

The code has the same steps as the code for 1-bit Adam (Tang et al., 2021) in DeepSpeed's file
deepspeed/runtime/comm/nccl.py:

1. Add the error of the previous step to the gradient.
2. Compute the scale: the norm divided by the square root of the number of values.
3. Compute the new error: the values minus their signs times the scale.
4. Pack eight signs into a byte with CuPy.

If CuPy is not installed, torch packs the signs.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_TIMES = 10


def measure(rounds: int, size: int, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Yields figures that can be compared with the figures of tfdist's kernels.

    If torch cannot use the GPU, yields the reason instead.

    Args:
        rounds: the number of rounds.
        size: the size of the gradients in bytes.
        device: the GPU, as torch names it.
    """
    torch, why = _found(device)
    if why:
        yield {"missing": "one bit by torch", "why": why}
        return
    cupy = _cupy() if device == "cuda" else None
    packing = "CuPy" if cupy else "torch"
    count = size // 4
    generator = torch.Generator(device).manual_seed(1)
    values = torch.randn(count, device=device, generator=generator)
    other, error = torch.empty_like(values), torch.zeros_like(values)
    scale, packed = encode(torch, values, error, cupy)
    todo: dict[str, Callable[[], Any]] = {
        "copy by torch": lambda: other.copy_(values),
        f"encode by torch, packed by {packing}": lambda: encode(torch, values, error, cupy),
        f"decode by torch, unpacked by {packing}": lambda: decode(torch, scale, packed, cupy),
    }
    bits = count // 8
    moved = [2 * size, 3 * size + bits, size + bits]
    besides = ["copy", "encode one bit with error", "decode one bit"]
    seconds: list[list[float]] = [[] for _ in todo]
    for _ in range(rounds + 1):
        for run, each in zip(todo.values(), seconds, strict=True):
            each.append(_time(torch, run, device))
    for name, each, bytes_, beside in zip(todo, seconds, moved, besides, strict=True):
        took = statistics.median(each[1:])
        yield {"figure": name, "bytes": bytes_, "beside": beside, "seconds": took}


def encode(torch: Any, values: Any, error: Any, cupy: Any = None) -> tuple[Any, Any]:
    """Encodes the sum of `values` and `error`, and overwrites `error` with the new error.

    Args:
        torch: the module torch.
        values: the gradient.
        error: the error of the previous step.
        cupy: the module CuPy; None to pack the signs with torch.

    Returns:
        The scale and the packed signs.
    """
    corrected = values + error
    scale = corrected.norm() / corrected.numel() ** 0.5
    positive = corrected >= 0
    torch.sub(corrected, _signed(positive) * scale, out=error)
    return scale, _packed(torch, positive, cupy)


def decode(torch: Any, scale: Any, packed: Any, cupy: Any = None) -> Any:
    """Unpacks the signs, and returns their products with the scale."""
    if cupy:
        bits = torch.from_dlpack(cupy.unpackbits(cupy.from_dlpack(packed)))
    else:
        shifts = torch.arange(7, -1, -1, device=packed.device, dtype=torch.uint8)
        bits = (packed[:, None] >> shifts & 1).flatten()
    return _signed(bits) * scale


def _signed(bits: Any) -> Any:
    return bits.float() * 2 - 1


def _packed(torch: Any, bits: Any, cupy: Any) -> Any:
    if cupy:
        return torch.from_dlpack(cupy.packbits(cupy.from_dlpack(bits.byte())))
    weights = 2 ** torch.arange(7, -1, -1, device=bits.device, dtype=torch.uint8)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _time(torch: Any, run: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    for _ in range(_TIMES):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / _TIMES


def _found(device: str) -> tuple[Any, str]:
    """Imports torch.

    Returns:
        The module torch, and "". If torch cannot use the device: None, and the reason.
    """
    try:
        import torch
    except ImportError as error:
        return None, str(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if the driver is too old.
        if device == "cuda" and not torch.cuda.is_available():
            return None, f"torch {torch.__version__} sees no GPU"
    return torch, ""


def _cupy() -> Any:
    try:
        import cupy
    except ImportError:
        return None
    return cupy
