"""Sums and codecs of random tensors of torch, which are in its memory on the GPU, against float64.

That the bits are those of the processor's code, the C++ tests say.
"""

from __future__ import annotations

import ctypes
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# As in tfdist/csrc/types.h.
TYPES = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
OPS = ("sum", "mean", "min", "max", "product")
FORMS = ("half", "bfloat16", "float8", "levels", "powers", "two means", "signs")
COUNT = 150_001  # more than goes at once, and no whole vectors
BLOCK = 256
VALUES = 40 * BLOCK + 77
ONE_SHOT = 1 << 16


@pytest.fixture(scope="module")
def torch(is_stand_in: bool) -> Any:
    found = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is too old for it
        if not (is_stand_in or found.cuda.is_available()):
            pytest.skip(f"torch {found.__version__} sees no GPU")
    return found


@pytest.fixture(scope="module")
def device(torch: Any, is_stand_in: bool) -> str:
    return "cpu" if is_stand_in else "cuda"


@pytest.fixture(scope="module")
def call(toolchain: Any, kernels: Path, device: str, torch: Any) -> Callable[..., None]:
    """Calls a function of on_pointers.cc."""
    library = ctypes.CDLL(str(toolchain.library(Path(__file__).parent / "on_pointers.cc")))

    def called(function: str, *arguments: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()  # for what torch has put into its stream
        run = getattr(library, function)
        run.restype = ctypes.c_char_p
        assert run(str(kernels).encode(), *arguments) == b""

    return called


def _at(tensor: Any) -> ctypes.c_uint64:
    return ctypes.c_uint64(0 if tensor is None else tensor.data_ptr())


@pytest.mark.parametrize("type_", TYPES)
def test_reductions_are_rounded_once_or_twice(torch, device, call, type_):
    dtype = getattr(torch, type_)
    generator = torch.Generator(device).manual_seed(1)
    for op, count, one_shot in itertools.product(OPS, (1, 1000, COUNT), (0, ONE_SHOT)):
        if op == "mean" and not dtype.is_floating_point:
            continue
        pair = [_random(torch, device, dtype, count, generator) for _ in range(2)]
        result = [tensor.clone() for tensor in pair]
        at = (ctypes.c_uint64 * 2)(*(tensor.data_ptr() for tensor in result))
        size = ctypes.c_size_t(count * pair[0].element_size())
        kind = (1 + TYPES.index(type_), OPS.index(op), ctypes.c_size_t(one_shot))
        call("all_reduce", 2, at, size, *kind)
        where = f"{op} of {count}, {one_shot}"
        assert torch.equal(result[0].view(torch.uint8), result[1].view(torch.uint8)), where
        if dtype.is_floating_point:
            _check_rounded(torch, op, pair, result[0], where)
        else:
            assert torch.equal(result[0], _exact(torch, op, *pair)), where


def _random(torch: Any, device: str, dtype: Any, count: int, generator: Any) -> Any:
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        size = {"size": (count,), "device": device, "generator": generator}
        return torch.randint(limits.min, limits.max, dtype=dtype, **size)
    values = torch.randn(count, device=device, dtype=torch.float64, generator=generator)
    scales = torch.randn(count, device=device, dtype=torch.float64, generator=generator)
    values = (values * torch.exp2(scales)).to(dtype)
    values[torch.rand(count, device=device, generator=generator) < 0.001] = torch.nan
    return values


def _exact(torch: Any, op: str, a: Any, b: Any) -> Any:
    if op in ("sum", "mean"):
        return (a + b) / 2 if op == "mean" else a + b
    return a * b if op == "product" else getattr(torch, f"{op}imum")(a, b)


def _check_rounded(torch: Any, op: str, pair: list[Any], result: Any, where: str) -> None:
    exact = _exact(torch, op, *(tensor.double() for tensor in pair))
    assert torch.equal(result.isnan(), exact.isnan()), where
    of_type = torch.finfo(result.dtype)
    # Halves are summed in float32 before, whose rounding adds little.
    rounding = 0.0 if op in ("min", "max") else of_type.eps / 2 * 1.001
    allowed = rounding * exact.abs() + (of_type.smallest_normal * of_type.eps if rounding else 0)
    assert ((result.double() - exact).abs() <= allowed)[~exact.isnan()].all(), where


@dataclass(frozen=True)
class Codec:
    """One of tfdist/csrc/codec/codec.h."""

    form: str
    bits: int = 8
    at_random: bool = False
    norm: bool = False
    unit: bool = False
    clip: float = 0.0


def _codecs(form: str) -> list[Codec]:
    if form == "levels":
        settings = itertools.product((2, 4, 8), (False, True), (False, True), (0.0, 1.5))
        return [
            Codec(form, bits, random, norm, False, clip) for bits, random, norm, clip in settings
        ]
    return [Codec(form), *([Codec(form, unit=True)] if form == "signs" else [])]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feeds_back", [False, True])
def test_codecs_lose_no_more_than_they_promise(torch, device, call, form, feeds_back):
    generator = torch.Generator(device).manual_seed(2)
    given = {"device": device, "generator": generator}
    values = torch.randn(VALUES, **given) * torch.exp2(3 * torch.randn(VALUES, **given))
    values[BLOCK : 2 * BLOCK] = 0
    for codec in _codecs(form):
        if codec.unit and feeds_back:
            continue  # votes take none
        error = 0.1 * torch.randn(VALUES, **given) if feeds_back else None
        exact = values.double() if error is None else (values + error).double()
        decoded = torch.empty_like(values)
        call(
            "encode_and_decode",
            *(FORMS.index(form), codec.bits, codec.at_random, codec.norm, codec.unit),
            *(ctypes.c_float(codec.clip), BLOCK, _at(values), _at(error), _at(decoded)),
            *(ctypes.c_size_t(VALUES), 3),
        )
        found = decoded.double()
        if error is not None:
            lost = exact - found
            assert ((error.double() - lost).abs() <= 2.0**-24 * lost.abs()).all(), codec
        for block in zip(exact.split(BLOCK), found.split(BLOCK), strict=True):
            assert _CHECKS[form](torch, codec, *block), codec


_FLOAT = 2.0**-20  # what arithmetic in float32 may add, of a block's sums, too


def _half(torch: Any, _: Codec, exact: Any, found: Any) -> Any:
    most = exact.abs().max()
    return ((found - exact).abs() <= 2.0**-11 * exact.abs() + 2.0**-38 * most).all()


def _bfloat16(torch: Any, _: Codec, exact: Any, found: Any) -> Any:
    return ((found - exact).abs() <= 2.0**-8 * exact.abs()).all()


def _float8(torch: Any, _: Codec, exact: Any, found: Any) -> Any:
    denormal = exact.abs().max() / 448 * 2.0**-10
    allowed = torch.maximum(2.0**-4 * exact.abs(), denormal) * (1 + _FLOAT)
    return ((found - exact).abs() <= allowed).all()


def _levels(torch: Any, codec: Codec, exact: Any, found: Any) -> Any:
    most = exact.abs().max()
    if codec.clip:
        most = torch.minimum(most, codec.clip * exact.square().mean().sqrt())
    clipped = exact.clamp(-most, most)
    scale = clipped.square().sum().sqrt() if codec.norm else most
    step = scale / (2 ** (codec.bits - 1) - 1)
    allowed = (1 if codec.at_random else 0.5) * step + _FLOAT * scale
    levels = torch.where(step > 0, found / step, found)
    is_even = ((levels - levels.round()).abs() <= _FLOAT * 2**codec.bits).all()
    return is_even and ((found - clipped).abs() <= allowed).all()


def _powers(torch: Any, _: Codec, exact: Any, found: Any) -> Any:
    mantissa, exponent = torch.frexp(found.abs())
    over = exponent - torch.frexp(exact.abs()).exponent  # 0 for the power below, 1 for that above
    right = (mantissa == 0.5) & (over >= 0) & (over <= 1) & (found.sign() == exact.sign())
    return torch.where(exact == 0, found == 0, right).all()


def _two_means(torch: Any, _: Codec, exact: Any, found: Any) -> Any:
    means = torch.zeros_like(exact)
    for side in (exact < 0, exact >= 0):
        if side.any():
            means[side] = exact[side].mean()
    return ((found - means).abs() <= _FLOAT * means.abs()).all()


def _signs(torch: Any, codec: Codec, exact: Any, found: Any) -> Any:
    mean = exact.abs().mean()
    size = (mean > 0).double() if codec.unit else mean
    expected = torch.where(exact < 0, -size, size)
    return ((found - expected).abs() <= _FLOAT * size).all()


_CHECKS = dict(
    zip(FORMS, (_half, _bfloat16, _float8, _levels, _powers, _two_means, _signs), strict=True)
)
