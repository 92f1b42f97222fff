"""Scripts as people write them give the result of one process."""

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import PACKAGE, assert_close, assert_equal, check_same_as_alone

LATE = [
    "made_in_the_first_step",
    "noise_without_a_seed",
    "noise_in_batches_of_fixed_size",
    "batches_that_only_the_step_knows",
    "metrics_built_in_the_first_step",
    "session_cleared_in_scope",
]
# By default.
USUAL = ["metrics_built_in_the_first_step"]


@pytest.mark.parametrize("behaviour", some(["save_in_scope", "callbacks_in_scope"], always=[]))
def test_scripts_with_files_give_the_result_of_one_process(behaviour, tmp_path):
    results = []
    for group in ("alone", "2"):
        folder = tmp_path / group
        folder.mkdir()
        results += GROUPS[group].run(f"{PACKAGE}.scripts:{behaviour}", str(folder))
    for rank, result in enumerate(results[1:]):
        assert_close(result, results[0], f"rank {rank}")
        assert_equal(result["weights"], results[1]["weights"], f"rank {rank}")


@pytest.mark.parametrize("behaviour", some(LATE, always=USUAL))
def test_what_is_built_in_the_first_step(behaviour):
    check_same_as_alone("2", f"scripts:{behaviour}")


@exhaustive
@pytest.mark.parametrize("behaviour", ["noise_without_a_seed", "made_in_the_first_step"])
def test_several_devices_give_the_result_of_one_process(behaviour):
    check_same_as_alone("1x2", f"scripts:{behaviour}")


def test_a_model_that_one_worker_makes_alone_in_the_scope():
    for message in GROUPS["2"].run(f"{PACKAGE}.scripts:made_by_one_worker_alone"):
        assert "'probe/kernel'" in message or "'kernel'" in message
        assert "timed out after 600 s waiting for 1 of 2 workers" in message
        assert "outside the scope" in message


@exhaustive
@pytest.mark.parametrize(
    "behaviour",
    [
        "fewer_rows_than_replicas",
        "batches_of_fixed_size_that_do_not_divide",
        "stateful_layers",
        "predictions_by_size",
    ],
)
def test_short_batches_give_the_result_of_one_process(behaviour):
    check_same_as_alone("2", f"scripts:{behaviour}")


@exhaustive
def test_traced_sizes_are_those_of_one_process():
    sizes = f"{PACKAGE}.scripts:sizes_that_are_traced"
    expected = GROUPS["alone"].run(sizes)[0]
    assert expected == [1, 2, 3, 4]
    assert GROUPS["2"].run(sizes) == [expected, expected]


@exhaustive
@pytest.mark.parametrize("group", ["3", "1x2"])
@pytest.mark.parametrize(
    "behaviour", ["stateful_layers", "batches_of_fixed_size_that_do_not_divide"]
)
def test_short_batches_of_more_replicas(behaviour, group):
    check_same_as_alone(group, f"scripts:{behaviour}")


def test_a_loop_without_run():
    for message in GROUPS["2"].run(f"{PACKAGE}.scripts:loop_without_run"):
        assert "`strategy.run(step, args=(batch,))`" in message
        assert "\n" not in message


@exhaustive
@pytest.mark.parametrize("eagerly", [False, True])
def test_a_replica_without_rows(eagerly):
    check_same_as_alone("2", "scripts:convolutions_of_no_rows", eagerly)


@exhaustive
def test_slices_of_a_replica_without_rows():
    check_same_as_alone("2", "scripts:embeddings_of_no_rows")
