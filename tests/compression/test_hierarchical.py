"""Sparsifiers, low rank and momenta against their papers' formulas, in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compression.team import alone, draw, on_ranks
from tests.harness.tiers import exhaustive
from tfdist.compression import DGC, PowerSGD, RandomK, Signum, Threshold, TopK

SHAPE = (60, 50)


def largest(values, count):
    """Zero but for so many values of largest magnitude."""
    chosen = np.argsort(-np.abs(values), axis=None, kind="stable")[:count]
    kept = np.zeros(values.size, np.float32)
    kept[chosen] = values.ravel()[chosen]
    return kept.reshape(values.shape)


def test_topk_sends_the_largest_and_keeps_the_rest():
    steps = [draw(SHAPE, seed) for seed in range(4)]
    sums, member = alone(TopK(ratio=0.02), *steps)
    error = np.zeros(SHAPE, np.float32)
    for gradient, total in zip(steps, sums, strict=True):
        error += gradient
        expected = largest(error, 60)
        np.testing.assert_allclose(total, expected, rtol=1e-6)
        error -= expected
    np.testing.assert_allclose(member.kept("error")[0], error.ravel(), rtol=1e-6)


def test_topk_of_several_ranks():
    def body(rank, member):
        return member.sum([draw(SHAPE, rank)], 0)[0]

    for total in on_ranks(TopK(ratio=0.1, error_feedback=False), 3, [SHAPE], body):
        expected = sum(largest(draw(SHAPE, rank), 300) for rank in range(3))
        np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_threshold_sends_what_exceeds_it():
    steps = [draw(SHAPE, seed) for seed in range(3)]
    sums, _ = alone(Threshold(threshold=2.0), *steps)
    error = np.zeros(SHAPE, np.float32)
    for gradient, total in zip(steps, sums, strict=True):
        error += gradient
        expected = np.where(np.abs(error) >= 2, error, 0)
        np.testing.assert_allclose(total, expected, rtol=1e-6)
        error -= expected


@pytest.mark.parametrize("clip_norm", [None, 10.0])
def test_dgc_follows_its_formula(clip_norm):
    steps = [draw(SHAPE, seed) for seed in range(5)]
    sums, _ = alone(DGC(ratio=0.01, momentum=0.8, clip_norm=clip_norm), *steps)
    u = v = np.zeros(SHAPE, np.float32)
    for gradient, total in zip(steps, sums, strict=True):
        norm = np.linalg.norm(gradient)
        clipped = gradient if clip_norm is None else gradient * min(1.0, clip_norm / norm)
        u = 0.8 * u + clipped
        v = v + u
        expected = largest(v, 30)
        np.testing.assert_allclose(total, expected, rtol=1e-4)
        u, v = np.where(expected, 0, u), np.where(expected, 0, v)


def test_dgc_clips_for_all_hosts_together():
    """As many gradients of that length as there are hosts are as long as one in one process."""

    def body(rank, member):
        return member.sum([draw(SHAPE, rank)], 0)[0]

    codec = DGC(ratio=1.0, momentum=0, clip_norm=4.0)
    (total, *_) = on_ranks(codec, 4, [SHAPE], body)
    expected = sum(2 * draw(SHAPE, r) / np.linalg.norm(draw(SHAPE, r)) for r in range(4))
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-6)


def test_dgc_sends_less_and_less():
    gradient = draw(SHAPE)
    sums, _ = alone(DGC(ratio=0.001, ramp_steps=8), *[gradient] * 10)
    sent = [np.count_nonzero(total) for total in sums]
    quarter = SHAPE[0] * SHAPE[1] / 4
    stages = [quarter, quarter / 4, quarter / 16, quarter / 64]
    expected = [round(stage) for stage in stages for _ in range(2)] + [3, 3]
    np.testing.assert_allclose(sent, expected, atol=1)


@exhaustive
def test_randomk_takes_every_value_as_often():
    codec, values = RandomK(ratio=0.02), 2000
    taken = np.zeros(values)
    for step in range(500):
        places, sizes = codec._places(values, np.int64(step), 0)
        assert len(places) == 40 and np.all(np.diff(places) > 0) and sizes.numpy().sum() == values
        taken[places.numpy()] += 1
    assert abs(taken - 10).max() < 6 * np.sqrt(10)


def test_randomk_sends_the_same_elements_exactly():
    def body(rank, member):
        return member.sum([draw(SHAPE, rank)], 0)[0]

    results = on_ranks(RandomK(ratio=0.1), 3, [SHAPE], body)
    exact = sum(draw(SHAPE, rank) for rank in range(3))
    for total in results:
        sent = total != 0
        assert sent.sum() == 300
        np.testing.assert_allclose(total[sent], exact[sent], rtol=1e-5, atol=1e-6)


@exhaustive
def test_randomk_without_feedback_is_unbiased():
    gradient = draw((20, 20))
    sums, _ = alone(RandomK(ratio=0.1, error_feedback=False), *[gradient] * 200)
    deviation = np.abs(gradient) * np.sqrt(9 / 200)
    assert np.all(np.abs(np.mean(sums, axis=0) - gradient) <= 5 * deviation + 1e-6)


def test_powersgd_follows_its_formula():
    ranks, steps, rank = 3, 4, 2
    shape = (3, 4, 5, 30)
    gradients = [[draw(shape, 10 * r + s) for r in range(ranks)] for s in range(steps)]
    first = PowerSGD(rank=rank).first("query", (30, rank)).numpy()

    def body(r, member):
        return [member.sum([gradients[s][r]], s)[0] for s in range(steps)]

    results = on_ranks(PowerSGD(rank=rank), ranks, [shape], body)
    errors = [np.zeros((60, 30))] * ranks
    query = first.astype(np.float64)
    for s in range(steps):
        matrices = [gradients[s][r].reshape(60, 30) + errors[r] for r in range(ranks)]
        mean = sum(matrices) / ranks
        left, _ = np.linalg.qr(mean @ query)
        query = mean.T @ left
        approximation = left @ query.T
        errors = [m - approximation for m in matrices]
        np.testing.assert_allclose(
            results[0][s].reshape(60, 30), ranks * approximation, rtol=1e-3, atol=1e-4
        )


def test_powersgd_finds_what_has_its_rank():
    gradient = draw((80, 3), 1) @ draw((3, 70), 2)
    sums, member = alone(PowerSGD(rank=3), *[gradient] * 3)
    np.testing.assert_allclose(sums[-1], gradient, atol=1e-3)
    assert np.abs(member.kept("error")[0]).max() < 1e-3


def test_powersgd_goes_on_after_zeros():
    gradient = draw((80, 3), 1) @ draw((3, 70), 2)
    zeros = np.zeros_like(gradient)
    sums, _ = alone(PowerSGD(rank=3), gradient, zeros, zeros, *[gradient] * 4)
    np.testing.assert_allclose(sum(sums), 5 * gradient, atol=2e-2)


def test_what_powersgd_makes_smaller():
    codec = PowerSGD(rank=4)
    assert codec.compresses((2048, 2048)) and codec.compresses((3, 3, 64, 64))
    assert not codec.compresses((2048, 4)) and not codec.compresses((100,))


def test_signum_votes_on_signs_of_moving_averages():
    ranks, steps = 3, 4
    gradients = [[draw(SHAPE, 10 * r + s) for r in range(ranks)] for s in range(steps)]

    def body(r, member):
        return [member.sum([gradients[s][r]], s)[0] for s in range(steps)]

    results = on_ranks(Signum(momentum=0.7), ranks, [SHAPE], body)
    averages = [np.zeros(SHAPE)] * ranks
    for s in range(steps):
        averages = [0.7 * averages[r] + 0.3 * gradients[s][r] for r in range(ranks)]
        votes = np.sign(sum(np.sign(average) for average in averages))
        assert np.mean(results[0][s] == votes) > 0.999


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(ratio=0), r"TopK: `ratio` must be in \(0, 1\]\. Received: 0"),
        (lambda: RandomK(ratio=1.5), "`ratio` must be in"),
        (lambda: Threshold(threshold=-1.0), "`threshold` must be a positive"),
        (lambda: DGC(momentum=1.0), "`momentum` must be in"),
        (lambda: DGC(clip_norm=0.0), "`clip_norm` must be positive"),
        (lambda: DGC(ramp_steps=-1), "`ramp_steps` must be >= 0"),
        (lambda: PowerSGD(rank=0), "`rank` must be >= 1"),
        (lambda: PowerSGD(rank=1.5), "PowerSGD: `rank` must be of type int. Received: 1.5"),
        (lambda: TopK(ratio="a"), "TopK: `ratio` must be of type float. Received: 'a'"),
        (lambda: DGC(clip_norm="a"), r"`clip_norm` must be of type float \| None"),
        (lambda: Threshold(threshold=1e-46), "`threshold` must be a positive"),
        (lambda: Threshold(threshold=float("inf")), "`threshold` must be a positive"),
        (lambda: Signum(momentum=-0.1), "`momentum` must be in"),
    ],
)
def test_wrong_settings_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
