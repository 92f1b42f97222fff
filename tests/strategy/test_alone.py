"""What one worker does alone waits for nobody, and what all must do together is refused to it."""

import pytest

from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import PACKAGE, assert_close, assert_equal, check_same_as_alone

ALONE = f"{PACKAGE}.alone"


@exhaustive
def test_the_chief_asks_and_trains_models_of_its_own():
    expected, expected_said = reference(f"{ALONE}:a_teacher")
    (result, said), (other, nothing_said) = GROUPS["2"].run(f"{ALONE}:a_teacher")
    assert_close(result, expected, "chief")
    assert_close(said, expected_said, "by itself")
    assert nothing_said == {}
    assert_equal(other["weights"], result["weights"], "worker 1")


def test_training_outside_of_the_scope_is_refused():
    for said, untouched in GROUPS["2"].run(f"{ALONE}:training_outside_of_the_scope"):
        assert untouched
        for message, call in zip(said, ("fit", "train_on_batch"), strict=True):
            assert message.startswith(f"ValueError: `{call}` requires a model created in the scope")
            assert "Create or load it inside `with strategy.scope():`" in message


@exhaustive
def test_the_chief_loads_weights_in_the_scope():
    check_same_as_alone("2", "alone:loading_in_the_scope")


@pytest.mark.parametrize("group", ["1", "2"])
def test_keras_distribution_is_refused(group):
    for said in GROUPS[group].run(f"{ALONE}:distributed_by_keras_too"):
        for message in said:
            assert message.startswith("UnsupportedError: A model under a tfdist strategy is dist")
            assert "a DataParallel set by keras.distribution.set_distribution" in message
