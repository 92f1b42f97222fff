"""The collectives for user code give what NumPy gives, on every rank the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.groups import GROUPS
from tests.harness.ranks import Ranks
from tests.harness.tiers import some

BEHAVIOURS = "tests.comm.behaviours"


def run(group, behaviour):
    return GROUPS[group].run(f"{BEHAVIOURS}:{behaviour}")


def own(rank, shape=(5, 3)):
    return (np.arange(np.prod(shape)).reshape(shape) * (rank + 1)) % 7.0


def reduced(values, op, dtype):
    if dtype == "bool":
        values = [v != 0 for v in values]
        every = np.logical_and if op in ("min", "product") else np.logical_or
        return every.reduce(values).astype(float)
    function = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "product": np.prod}
    exact = function[op](values, axis=0)
    return exact if np.dtype(float) == dtype else exact.astype(wrapping(dtype)).astype(float)


def wrapping(dtype):
    return {"uint8": np.uint8, "int8": np.int8}.get(dtype, float)


@pytest.mark.parametrize("group", some(["2", "3", "4"], always=["2", "4"]))
def test_reductions_are_those_of_numpy(group):
    results = run(group, "reductions")
    values = [own(rank) for rank in range(int(group))]
    for result in results:
        for key, value in result.items():
            dtype, op = key.split()
            tolerance = {"float16": 1e-3, "bfloat16": 1e-2}.get(dtype, 1e-6)
            expected = reduced(values, op, dtype)
            np.testing.assert_allclose(value, expected, rtol=tolerance, err_msg=key)
            assert np.array_equal(value, results[0][key]), key


@pytest.mark.parametrize("group", some(["2", "3"], always=["3"]))
def test_nests_are_reduced_leaf_by_leaf(group):
    for result in run(group, "nests"):
        total = sum(own(rank) for rank in range(int(group)))
        assert np.array_equal(result["a"], total)
        assert np.array_equal(result["b"][0], total)
        assert result["b"][1].shape == (0, 2)
        assert np.array_equal(result["c"], total)


@pytest.mark.parametrize("group", some(["2", "3", "4"], always=["2", "4"]))
def test_gather_broadcast_and_scatter_move_the_right_rows(group):
    size = int(group)
    for rank, result in enumerate(run(group, "moves")):
        assert np.array_equal(result["gather"], np.concatenate([own(r) for r in range(size)]))
        uneven = np.concatenate([np.full((r, 2), float(r)) for r in range(size)])
        assert np.array_equal(result["uneven gather"], uneven)
        assert np.array_equal(result["broadcast"], own(size - 1))
        rows = [(other + rank) % 3 for other in range(size)]
        assert list(result["rows"]) == rows
        expected = [10.0 * rank + other for other in range(size) for _ in range(rows[other])]
        assert list(result["all to all"]) == expected
        assert np.array_equal(result["scatter"], result["whole"][6 * rank : 6 * rank + 6])


@pytest.mark.parametrize("group", some(["2", "3"], always=["3"]))
def test_messages_arrive_in_order(group):
    size = int(group)
    for rank, result in enumerate(run(group, "messages")):
        for i, received in enumerate(result):
            assert np.array_equal(received, np.full(4, float((rank - 1) % size + i)))


@pytest.mark.parametrize("group", some(["2", "3"], always=["3"]))
def test_in_loops_and_branches(group):
    size = int(group)
    for rank, result in enumerate(run(group, "in_loops_and_branches")):
        total = sum(own(r) for r in range(size))
        assert np.array_equal(result[0], own(rank))
        assert np.array_equal(result[1], total)
        assert np.array_equal(result[2], (total + 1) * size + 1)


@pytest.mark.parametrize("group", some(["2", "3"], always=["3"]))
def test_gradients_flow_back_through_collectives(group):
    size = int(group)
    # For each rank the gradient that comes in, were the output as long as the input.
    for rank, result in enumerate(run(group, "gradients")):
        rows = 2 * size
        weights = np.arange(2 * rows, dtype=float).reshape(rows, 2)
        total = weights * sum(r + 1 for r in range(size))
        part = np.arange(4, dtype=float).reshape(2, 2)
        parts = np.concatenate([part * (r + 1) for r in range(size)])
        every = np.arange(2 * rows * size, dtype=float).reshape(rows * size, 2)
        gathered = every * sum(r + 1 for r in range(size))
        exchanged = np.concatenate(
            [weights[2 * rank : 2 * rank + 2] * (r + 1) for r in range(size)]
        )
        expected = {
            "all_reduce": total,
            "mean": total / size,
            "reduce_scatter": parts,
            "all_gather": gathered[rows * rank : rows * (rank + 1)],
            "broadcast": total if rank == 1 else np.zeros_like(total),
            "all_to_all": exchanged,
        }
        for name, value in expected.items():
            np.testing.assert_allclose(result[name], value, rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(result[f"{name} in a graph"], value, rtol=1e-6)


@pytest.mark.parametrize("group", some(["2", "3", "4"], always=["4"]))
def test_split_communicators_sum_over_their_members(group):
    size = int(group)
    for rank, result in enumerate(run(group, "split")):
        members = [r for r in range(size) if r // 2 == rank // 2]
        assert result["total"] == sum(members)
        assert result["place"] == (members.index(rank), len(members))
        assert result["found"] == (rank == 0)


def test_traffic_counts_shared_and_sent_bytes():
    for result in run("2", "traffic"):
        # Half of 4 MiB to the other, and half of the result.
        assert result == {"collectives": 1, "shared": 4 << 20, "sent": 0}


def test_wrong_calls_are_refused_with_the_rule():
    words = [
        "ValueError: `op` must be one of 'sum'",
        "ValueError: There is no communicator 'nobody'",
        "A mean is defined for floating types",
        "cuts the first axis into 2 equal parts",
        "needs a tensor with a first axis",
        "root of a broadcast must be a rank from 0 to 1",
        "with other ranks of its group only",
        "for each of 2 ranks",
    ]
    for result in run("2", "wrong_calls"):
        for said, word in zip(result, words, strict=True):
            assert word in said


@pytest.fixture
def group():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def test_another_shape_is_an_error_on_all_ranks(group):
    for first, later in group.run(f"{BEHAVIOURS}:other_shape"):
        assert "FailedPreconditionError" in first
        assert "all_reduce 'x' float32[3] sum" in first
        assert "all_reduce 'x' float32[4] sum" in first
        assert "float32[4]" in later  # What follows fails with the same reason.


def test_more_empty_rows_than_a_shape_counts_are_an_error(group):
    for said in group.run(f"{BEHAVIOURS}:empty_rows_beyond_a_shape"):
        assert said.startswith(("InternalError", "UnavailableError"))
        assert "has no room for the 0 bytes of all_gather" in said


def test_another_order_is_an_error_on_all_ranks(group):
    for said in group.run(f"{BEHAVIOURS}:other_order"):
        assert "FailedPreconditionError" in said
        assert "'a'" in said
        assert "'b'" in said


def test_abort_reaches_all_ranks(group):
    for said in group.run(f"{BEHAVIOURS}:one_aborts"):
        assert said.startswith("UnavailableError")
        assert "the cat walked over the keyboard" in said
