"""Workers that do not read the same global batches are told so before the first step."""

import numpy as np
import pytest

from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import PACKAGE, assert_close, check_same_as_alone

SAME_DATA = f"{PACKAGE}.same_data"


def check_refused(message):
    assert message.startswith("ProgramMismatchError: The workers read different data: worker 0 (")
    assert "worker 1 (" in message
    assert "don't shard the data by hand" in message


@exhaustive
@pytest.mark.parametrize("group", ["2", "2 by TensorFlow"])
def test_data_sharded_by_hand(group):
    answers = GROUPS[group].run(f"{SAME_DATA}:sharded_by_hand")
    for said, untouched, weights in answers:
        for message in said.values():
            check_refused(message)
        assert "x of float32[4, 8] in the first batch" in said["arrays"]
        assert "y of int64[4] in the first batch" in said["augmented"]
        # What `predict` reads it shares out, whatever the policy.
        assert ["OFF" in said[call] for call in ("arrays", "evaluate", "predict")] == [1, 1, 0]
        assert untouched
        assert all(map(np.array_equal, weights, answers[0][2]))
    assert answers[0][0] == answers[1][0]


@exhaustive
def test_files_sharded_by_hand():
    for said in GROUPS["2"].run(f"{SAME_DATA}:files_sharded_by_hand"):
        for message in said.values():
            check_refused(message)
        assert "worker 0 (" in said["reader"] and "2 files starting with '0.txt'" in said["reader"]
        assert "2 files starting with '1.txt'" in said["reader"]
        assert "has shard 0, 4 files" in said["Dataset.shard"]
        assert "4 files starting with '3.txt'" in said["order"]


def test_other_batches_are_refused_and_named():
    for said in GROUPS["2"].run(f"{SAME_DATA}:other_sizes"):
        for name in ("tf.data", "steps", "rows"):
            check_refused(said[name])
        assert "6 batches where" in said["tf.data"] and "4 batches." in said["tf.data"]
        assert "x of float32[4, 8] in the first batch" in said["steps"]
        assert "x of float32[5, 8]." in said["steps"]
        for name in ("batch_size", "validation_split", "class_weight", "validation_data"):
            assert said[name].startswith("ProgramMismatchError: The workers do not run the same")
            assert f"'{name}'" in said[name]


def test_weights_of_classes():
    """Their order and types may differ; rows of distributed data cannot be given weights."""
    expected, _ = reference(f"{SAME_DATA}:weights_of_classes")
    for outcome, said in GROUPS["2"].run(f"{SAME_DATA}:weights_of_classes"):
        assert_close(outcome, expected, "class_weight")
        assert said.startswith("ValueError: `class_weight` requires data that `fit` distributes")


@exhaustive
def test_inputs_may_be_augmented_otherwise_on_each_worker():
    first, second = GROUPS["2"].run(f"{SAME_DATA}:same_rows_otherwise_augmented")
    assert all(map(np.array_equal, first, second))


@exhaustive
@pytest.mark.parametrize(
    "kind",
    ["shuffled_anew_each_epoch", "a_generator_is_read_once"],
)
def test_input_is_as_in_one_process(kind):
    check_same_as_alone("2", f"same_data:{kind}")
