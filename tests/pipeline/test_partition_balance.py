"""The balance is the best there is: compared with all partitions of small cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tfdist._src.pipeline.partition.choose import balance
from tfdist.errors import PartitionError


def matrix(costs, sends=None):
    """What spans cost: their calls, and the values at both ends."""
    costs = list(costs)
    sends = sends if sends is not None else [0] * (len(costs) + 1)
    spans = np.full((len(costs) + 1, len(costs) + 1), np.inf)
    for begin, end in itertools.combinations(range(len(costs) + 1), 2):
        spans[begin, end] = sum(costs[begin:end]) + sends[begin] + sends[end]
    return spans


def all_partitions(costs, stages):
    """The maximum, the sum of squares, and the boundaries from behind, of each partition."""
    calls = len(costs) - 1
    for boundaries in itertools.combinations(range(1, calls), stages - 1):
        own = [costs[span] for span in itertools.pairwise((0, *boundaries, calls))]
        yield max(own), sum(cost**2 for cost in own), boundaries[::-1]


def test_no_partition_is_better():
    for seed in range(60):
        check_best(seed)


def check_best(seed):
    numbers = np.random.default_rng(seed)
    calls = int(numbers.integers(1, 10))
    stages = int(numbers.integers(1, calls + 1))
    # Small numbers make ties; some calls cost nothing.
    costs = matrix(numbers.integers(0, 6, calls), numbers.integers(0, 3, calls + 1))
    costs[numbers.random(costs.shape) < 0.1] = np.inf
    expected = min(all_partitions(costs, stages))
    if np.isinf(expected[0]):
        with pytest.raises(PartitionError, match="no partition"):
            balance(costs, stages)
    else:
        assert tuple(reversed(balance(costs, stages))) == expected[2], seed


@pytest.mark.parametrize(
    ("costs", "stages", "boundaries"),
    [
        ([4, 1, 1, 4], 2, [2]),
        ([1] * 8, 4, [2, 4, 6]),
        ([9, 1, 1, 1, 1], 3, [1, 3]),
        ([0, 0, 0, 5], 2, [1]),
        ([3], 1, []),
        ([1, 2, 3], 3, [1, 2]),
    ],
)
def test_examples_are_balanced(costs, stages, boundaries):
    assert balance(matrix(costs), stages) == boundaries


def test_a_thousand_calls():
    costs = np.random.default_rng(0).integers(1, 100, 1000)
    total = np.concatenate([[0], np.cumsum(costs)]).astype(float)
    spans = total[None] - total[:, None]
    boundaries = balance(np.where(spans > 0, spans, np.inf), 16)
    largest = max(total[end] - total[begin] for begin, end in itertools.pairwise(boundaries))
    assert largest <= total[-1] / 16 + 100
