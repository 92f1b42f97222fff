"""What is not exact in microbatches is refused, as each of them has only some of the rows."""

import itertools

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive, some

PACKAGE = "tests.pipeline.refused_behaviours"
ROWS = "must treat the rows of a batch independently"
LINE = "refused_behaviours.py:"
SAID = {
    "centering": [ROWS, LINE],
    "a_penalty_that_couples_rows": [ROWS, LINE],
    "statistics_of_all_replicas": [ROWS],
    "float8": ["A float8 layer records the largest values"],
    "unlike_rows": ["for a pipeline must have the same number of rows. Received: (10, 4), (26, 2)"],
    "a_model_in_one_piece": ["requires a model in stages", "tfdist.PipelineModel"],
}


@pytest.mark.parametrize(
    "behaviour", some(list(SAID), always=["centering", "a_model_in_one_piece"])
)
def test_on_all_ranks(behaviour):
    for message in GROUPS["2"].run(f"{PACKAGE}:{behaviour}"):
        for part in SAID[behaviour]:
            assert part in message


# What one worker has otherwise, and what the error says of each worker.
OTHERWISE = {
    "activation": ("the layer 'dense", "'relu'", "'tanh'"),
    "units": ("the layer 'dense", "16", "24"),
    "rate": ("the layer 'dropout", "0.2", "0.1"),
    "policy": ("the layer 'dense", "'float32'", "mixed_bfloat16"),
    "more": ("the layer 'dropout", "Dropout", "ReLU"),
    "optimizer": ("`optimizer`,", "'momentum': 0.9", "'momentum': 0.5"),
    "loss": ("`loss`,", "'mse'", "'mae'"),
}


@pytest.mark.parametrize("what", some(list(OTHERWISE), always=["activation", "optimizer"]))
def test_workers_with_different_models(what):
    named, first, other = OTHERWISE[what]
    for said in GROUPS["2"].run(f"{PACKAGE}:another_model", what):
        assert said.startswith("The workers have different ")
        chief, _, worker = said.partition(" where worker 1")
        assert named in chief and first in chief and other in worker


@exhaustive
def test_names_may_differ():
    assert GROUPS["2"].run(f"{PACKAGE}:another_model", "names") == ["", ""]


@pytest.mark.parametrize(
    ("group", "size", "what"),
    some(
        [
            *itertools.product(["2"], [2, 1], ["learning rate", "by all", "as it was"]),
            *itertools.product(["2"], [1], ["weight", "behind"]),
            *itertools.product(["4"], [2], ["learning rate", "weight", "behind", "by all"]),
        ],
        always=[("2", 2, "learning rate")],
    ),
)
def test_state_that_one_worker_assigns(group, size, what):
    for said in GROUPS[group].run(f"{PACKAGE}:assigned_by_one", what, size):
        if what in ("by all", "as it was"):
            assert said == ""
        else:
            name = "sgd/learning_rate" if what == "learning rate" else "bias"
            assert said.startswith("The workers no longer have the same state: the variable '")
            assert name in said.split("differs")[0]
            assert "differs between worker 0 and worker 1" in said
