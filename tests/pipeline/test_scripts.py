"""What scripts do with models that is less usual gives what it gives in one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive, some
from tests.pipeline.script_behaviours import SCRIPTS
from tests.strategies.comparison import assert_close

PLACE = "tests.pipeline.script_behaviours"


@exhaustive
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_pipeline(name):
    expected = reference(f"{PLACE}:run", name)
    held = {}
    for rank, result in enumerate(GROUPS["2"].run(f"{PLACE}:run", name)):
        assert_close({"told": result["told"]}, {"told": expected["told"]}, f"rank {rank}")
        for i, value in result["own"].items():
            np.testing.assert_allclose(value, expected["own"][i], rtol=1e-5, atol=1e-5)
            assert np.array_equal(held.setdefault(i, value), value), f"variable {i}"
    assert set(held) == set(expected["own"])


@exhaustive
@pytest.mark.parametrize("name", ["shared_lookups", "a_metric_of_one_number", "metrics_of_layers"])
def test_two_pipelines(name):
    expected = reference(f"{PLACE}:run", name)
    for rank, result in enumerate(GROUPS["4"].run(f"{PLACE}:run", name)):
        assert_close({"told": result["told"]}, {"told": expected["told"]}, f"rank {rank}")
        for i, value in result["own"].items():
            np.testing.assert_allclose(value, expected["own"][i], rtol=1e-5, atol=1e-5)


@exhaustive
@pytest.mark.parametrize("seeded", [False, True])
def test_shared_variables_begin_equal(seeded):
    one, other = GROUPS["2"].run(f"{PLACE}:separate_draws", seeded)
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a, b)


@exhaustive
def test_a_shorter_batch_is_not_traced_again():
    assert GROUPS["2"].run(f"{PLACE}:times_traced") == [1, 1]


def test_ranks_that_disagree_on_what_is_trained():
    one, other = GROUPS["2"].run(f"{PLACE}:trainable_at_odds")
    assert one == other
    assert "'shared', trainable on worker 0" in one and "not on worker 1" in one


def test_a_batch_size_of_its_own_is_refused():
    for error in GROUPS["2"].run(f"{PLACE}:fixed_rows"):
        assert "divides a batch" in error and "(8, 3)" in error


def test_layers_in_two_models_are_refused():
    for error in GROUPS["2"].run(f"{PLACE}:layers_in_two_models"):
        assert "cannot be used in another model" in error


def test_what_the_chief_cannot_write(tmp_path):
    chiefs, others = GROUPS["2"].run(f"{PLACE}:failing_to_write", str(tmp_path))
    assert "No such file or directory" in chiefs[0]
    assert "The chief could not write" in others[0] and "missing" in others[0]
    assert chiefs[1] == others[1] > 0


def test_a_save_of_the_chief_alone(tmp_path):
    assert GROUPS["2"].run(f"{PLACE}:saving_twice", str(tmp_path)) == [True, True]


def test_a_clone():
    for error in GROUPS["2"].run(f"{PLACE}:cloning"):
        assert "model.full_model()" in error


@exhaustive
def test_saving_on_the_chief_alone():
    ours, _ = GROUPS["2"].answers(f"{PLACE}:saving_alone")
    GROUPS["2"].stop()  # Its workers have waited for one another in vain.
    assert "'saving a PipelineModel, which all workers must do together' timed out" in ours[1]
    assert "1 of 2 workers: worker 1" in ours[1]


@pytest.mark.parametrize("schedule", some(["gpipe", "1f1b", "zb_h1"], always=["1f1b"]))
def test_functions_that_only_order_operations(schedule):
    # Three batches of two microbatches, each of which a rank computes once.
    for calls in GROUPS["2"].run(f"{PLACE}:calls_that_only_order", schedule):
        assert calls == {"forward": 6, "backward": 6}
