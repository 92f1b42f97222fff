"""What all codecs promise: a new one in the registry is tested unasked."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tests.compression.team import alone, draw, on_ranks
from tests.harness.tiers import rotating, some
from tfdist.compression import CODECS

SHAPES = [(64, 80), (3, 3, 8, 33), (1003,), (1, 1), (0, 5), (16, 300)]
VOTES = {"signsgd", "signum"}
# Whose sums are votes, or a part of momenta: the cosine of their angle to the sum of gradients.
DIRECTIONS = {"signsgd": 0.6, "signum": 0.6, "dgc": 0.05}
CARRIED = [name for name, kind in CODECS.items() if kind._payload != "sharded"]


def shapes_of(codec):
    return [shape for shape in SHAPES if codec.compresses(shape)]


def with_feedback(name):
    """The codec with error feedback; None for one that does not know it."""
    kind = CODECS[name]
    fields = {field.name for field in dataclasses.fields(kind)}
    codec = kind(error_feedback=True) if "error_feedback" in fields else kind()
    return codec if "error" in codec.kept((64, 80)) else None


def cosine(one, other):
    """Of the angle between two arrays."""
    return (one * other).sum() / (np.linalg.norm(one) * np.linalg.norm(other))


RANKS = list(itertools.product(CODECS, [1, 2, 3, 4]))
# One of each payload by any number of ranks.
USUAL = [(name, n) for name, n in RANKS if n == 3 or name in ("int8", "topk", "powersgd")]


@pytest.mark.parametrize(("name", "ranks"), some(RANKS, always=USUAL))
def test_equal_everywhere_and_nothing_lost(name, ranks):
    codec = with_feedback(name) or CODECS[name]()
    shapes, steps = shapes_of(codec), 3

    def given(rank, step):
        return [draw(shape, 100 * rank + step) for shape in shapes]

    def body(rank, member):
        sums = [member.sum(given(rank, step), step) for step in range(steps)]
        return sums, member.kept("error") if "error" in codec.kept((64, 80)) else None

    results = on_ranks(codec, ranks, shapes, body)
    for sums, _ in results:
        for mine, first in zip(sums, results[0][0], strict=True):
            for a, b, shape in zip(mine, first, shapes, strict=True):
                assert a.shape == shape and a.dtype == np.float32
                assert np.array_equal(a, b)
    for i, shape in enumerate(shapes):
        came = sum(sums[i] for sums in results[0][0])
        brought = sum(given(rank, step)[i] for rank in range(ranks) for step in range(steps))
        if name in DIRECTIONS:
            assert came.size < 2 or cosine(came, brought) > DIRECTIONS[name]
            continue
        left = sum(error[i] for _, error in results).reshape(shape)
        np.testing.assert_allclose(came + left, brought, atol=1e-5 * ranks * steps)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros(name):
    shapes = shapes_of(CODECS[name]())
    zeros = [np.zeros(shape, np.float32) for shape in shapes]
    for sums in on_ranks(CODECS[name](), 2, shapes, lambda _, member: member.sum(zeros, 0)):
        assert not any(total.any() for total in sums)


@pytest.mark.parametrize(("name", "value"), rotating(list(CODECS), [np.nan, np.inf, -np.inf]))
def test_what_is_not_finite_shows_and_is_forgotten(name, value):
    """It shows everywhere in the same step, and is forgotten afterwards."""
    shape = (64, 80)

    def body(rank, member):
        broken = draw(shape, rank)
        if rank == 1:
            broken[7:40, 11] = value
        first = member.sum([draw(shape, 10 + rank)], 0)[0]
        second = member.sum([broken], 1)[0]
        return first, second, member.sum([draw(shape, 20 + rank)], 2)[0]

    for first, second, third in on_ranks(CODECS[name](), 2, [shape], body):
        assert np.isfinite(first).all()
        assert not np.isfinite(second).all()
        assert np.isfinite(third).all()


@pytest.mark.parametrize(
    ("name", "scale"),
    rotating([n for n in CODECS if n not in VOTES | {"threshold"}], [2.0**-60, 2.0**60]),
)
def test_tiny_and_huge_values(name, scale):
    """The same as of ordinary ones, only smaller or larger."""
    steps = [draw((64, 80), seed).clip(-3, 3) for seed in range(2)]
    plain, _ = alone(CODECS[name](), *steps)
    scaled, _ = alone(CODECS[name](), *(g * np.float32(scale) for g in steps))
    for a, b in zip(scaled, plain, strict=True):
        np.testing.assert_allclose(a / np.float32(scale), b, rtol=1e-4, atol=1e-4)


def test_only_votes_have_no_error_feedback():
    assert {name for name in CODECS if with_feedback(name) is None} == VOTES


@pytest.mark.parametrize("name", [name for name in CODECS if name not in VOTES])
def test_error_is_bounded(name):
    """Error feedback needs a codec that brings some of the gradient along in every step."""
    codec = with_feedback(name)
    # Of an unbiased codec with large errors, and of momenta, the errors may be larger.
    once, twice = {"terngrad": (1.5, 2.5), "dgc": (1.0, 3.0)}.get(name, (1.0, 2.0))

    def body(rank, member):
        gradient = draw((64, 80), rank)
        sizes = []
        for step in range(2):
            member.sum([gradient], step)
            sizes.append(np.linalg.norm(member.kept("error")[0]) / np.linalg.norm(gradient))
        return sizes

    for first, second in on_ranks(codec, 2, [(64, 80)], body):
        assert 0 < first < once and 0 < second < twice


@pytest.mark.parametrize("name", [n for n in CODECS if CODECS[n]().kept((64, 80))])
def test_resumes_bit_for_bit(name, tmp_path):
    shape = (64, 80)

    def whole(rank, member):
        sums = [member.sum([draw(shape, 10 * step + rank)], step)[0] for step in range(4)]
        return sums[2:]

    def first_half(rank, member):
        for step in range(2):
            member.sum([draw(shape, 10 * step + rank)], step)
        tf.train.Checkpoint(state=member.state).write(f"{tmp_path}/{rank}")

    def second_half(rank, member):
        tf.train.Checkpoint(state=member.state).read(f"{tmp_path}/{rank}").assert_consumed()
        return [member.sum([draw(shape, 10 * step + rank)], step)[0] for step in range(2, 4)]

    expected = on_ranks(CODECS[name](), 2, [shape], whole)
    on_ranks(CODECS[name](), 2, [shape], first_half)
    for mine, theirs in zip(
        on_ranks(CODECS[name](), 2, [shape], second_half), expected, strict=True
    ):
        assert all(map(np.array_equal, mine, theirs))


@pytest.mark.parametrize("name", CODECS)
def test_codecs_are_settings(name):
    codec = CODECS[name]()
    assert codec == CODECS[name]() and hash(codec) == hash(CODECS[name]())
    assert codec._payload in {"sharded", "summed", "gathered"}
    assert 0 < codec.bits_per_value((64, 80)) <= 64
    assert CODECS[name](warmup_steps=5).warmup_steps == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.warmup_steps = 1
    with pytest.raises(ValueError, match=r"`warmup_steps` must be >= 0\. Received: -1"):
        CODECS[name](warmup_steps=-1)


def test_docstrings_tell_what_one_must_know():
    for codec in CODECS.values():
        text = codec.__doc__
        assert "Source: " in text and ("bits" in text or "bit " in text)
        for field in dataclasses.fields(codec):
            assert f"        {field.name}: " in text or field.name == "warmup_steps"


@pytest.mark.parametrize("name", CARRIED)
def test_bits_are_fewer(name):
    codec = CODECS[name]()
    assert name == "threshold" or codec.bits_per_value((512, 512)) < 4
    assert math.isfinite(codec.bits_per_value((512, 512)))
