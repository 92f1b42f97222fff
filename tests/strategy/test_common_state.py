"""What workers must have in common is compared in each step: state, and the rows of batches."""

import contextlib
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.harness.groups import GROUPS
from tests.harness.ranks import Ranks
from tests.harness.tiers import exhaustive, some, spread
from tests.strategy.behaviours.common_state import ASSIGNED, PLACES
from tests.strategy.comparison import PACKAGE, check_same_as_alone
from tfdist._src.keras.fit import step_exchange
from tfdist._src.keras.fit.step_exchange import Request, StepExchange, as_heard, heard

COMMON = f"{PACKAGE}.common_state"
CASES = list(itertools.product(ASSIGNED, PLACES))
COVERING = spread(list(ASSIGNED), list(PLACES), 2)


@pytest.mark.parametrize(
    ("what", "place"), some(CASES, always=[("learning rate", "batch")], covering=COVERING)
)
def test_what_one_worker_assigns_is_found_in_the_next_step(what, place):
    for said in GROUPS["2"].run(f"{COMMON}:assigned_by_one", what, place):
        assert said.startswith("The workers no longer have the same state: the variable '")
        assert ASSIGNED[what][1] in said.split("differs")[0]
        assert "differs between worker 0 and worker 1" in said


@pytest.mark.parametrize(
    ("what", "place"), some(CASES, always=[("weights", "epoch")], covering=COVERING)
)
def test_what_all_assign_counts(what, place):
    check_same_as_alone("2", "common_state:assigned_by_all", what, place)


def test_the_accumulated_gradients_of_another_model_may_differ():
    check_same_as_alone("2", "common_state:own_state_of_another_model")


@exhaustive
@pytest.mark.parametrize("group", ["3", "2x2", "2 by TensorFlow"])
def test_other_groups_compare_state_too(group):
    for said in GROUPS[group].run(f"{COMMON}:assigned_by_one", "learning rate", "batch"):
        assert "'sgd/learning_rate' differs between worker 0" in said
        assert ": 0.1" in said and " and 0.5." in said
    check_same_as_alone(group, "common_state:assigned_by_all", "weights", "epoch")


@exhaustive
def test_a_sharded_optimizer():
    for said in GROUPS["2"].run(f"{COMMON}:assigned_by_one_while_sharded"):
        assert "learning_rate' differs between worker 0 and worker 1" in said


@exhaustive
def test_values_count_and_not_assignments():
    check_same_as_alone("2", "common_state:assigned_as_it_was")


def test_samples_of_all_weights_are_compared_when_a_training_begins():
    for said in GROUPS["2"].run(f"{COMMON}:changed_behind"):
        assert "kernel' differs between worker 0 and worker 1" in said


@pytest.mark.parametrize("what", some(["weight", "outside"], always=["weight"]))
def test_samples_are_compared_every_few_steps(what):
    for said, batches in GROUPS["2"].run(f"{COMMON}:changed_within_an_epoch", what):
        assert "differs between worker 0 and worker 1" in said
        assert 5 <= batches <= 8


@pytest.mark.parametrize(
    ("form", "eager", "counts", "found"),
    some(
        [
            ("arrays", False, (48, 40), ("6 batches", "5 batches")),
            ("arrays", False, (48, 47), ("6 batches", "6 batches, the last one of 7 rows")),
            *(
                (form, eager, counts, ("a batch of 8 rows", last))
                for form in ("generator", "evaluate", "predict")
                for eager in (False, True)
                for counts, last in (
                    ((48, 40), "no batch"),
                    ((24, 16), "no batch"),
                    ((48, 47), "a batch of 7 rows"),
                )
            ),
        ],
        always=[
            ("arrays", False, (48, 40), ("6 batches", "5 batches")),
            ("generator", False, (48, 47), ("a batch of 8 rows", "a batch of 7 rows")),
            ("predict", True, (48, 40), ("a batch of 8 rows", "no batch")),
        ],
    ),
)
def test_rows_that_one_worker_has_more(form, eager, counts, found):
    for said in GROUPS["2"].run(f"{COMMON}:unlike_rows", form, eager, counts):
        assert said.startswith("The workers read different data: worker 0 (")
        assert found[0] in said and f"has {found[1]}" in said


SETTINGS = {"": {}, "eager": {"run_eagerly": True}, "XLA": {"jit_compile": True}}
ON_BATCH = ["train_on_batch", "test_on_batch", "predict_on_batch"]
BATCHES = [
    *itertools.product(ON_BATCH, [(), (48,), (9,)], [(48, 40), (48, 47), (1, 2), (40, 48)], [""]),
    *itertools.product(ON_BATCH, [(), (48,)], [(48, 47)], ["eager", "XLA"]),
]


@pytest.mark.parametrize(
    ("call", "before", "counts", "settings"),
    some(
        BATCHES,
        always=[
            ("train_on_batch", (), (48, 40), ""),
            ("train_on_batch", (9,), (48, 47), ""),
            ("predict_on_batch", (48,), (48, 40), ""),
            ("predict_on_batch", (), (48, 47), "eager"),
        ],
    ),
)
def test_batches_of_other_sizes(call, before, counts, settings):
    check_unlike_batches("2", call, before, counts, settings)


@exhaustive
@pytest.mark.parametrize(("group", "counts"), [("3", (48, 47, 48)), ("2x2", (48, 46))])
@pytest.mark.parametrize("call", ["train_on_batch", "predict_on_batch"])
@pytest.mark.parametrize("settings", ["", "eager"])
def test_batches_of_other_sizes_in_other_groups(group, counts, call, settings):
    check_unlike_batches(group, call, (), counts, settings)


def check_unlike_batches(group, call, before, counts, settings):
    arguments = (call, before, counts, SETTINGS[settings])
    results = GROUPS[group].run(f"{COMMON}:unlike_batches", *arguments)
    for said, kept, result, weights in results:
        assert said.startswith("The workers read different data: worker 0 (")
        assert f"has a batch of {counts[0]} rows where worker" in said
        assert kept or settings == "eager"
        np.testing.assert_array_equal(result, results[0][2])
        assert all(map(np.array_equal, weights, results[0][3]))


OTHER_PROGRAMS = ["order", "constant", "more", "loss", "clipnorm", "predict"]


@pytest.mark.parametrize("kind", some(OTHER_PROGRAMS, always=["order"]))
@pytest.mark.parametrize("odd", some([0, 1], always=[1]))
def test_another_program_on_one_worker_is_found(kind, odd):
    for said in GROUPS["2"].run(f"{COMMON}:refused_program", kind, odd):
        assert said.startswith("The workers run different programs in their steps: worker 1 (")
        assert " where worker 0 (" in said
        if kind != "clipnorm":
            assert said.count("common_state.py:") == 2


@exhaustive
@pytest.mark.parametrize("group", ["2", "3", "2x2", "2 by TensorFlow"])
def test_what_tells_and_computes_nothing_may_differ(group):
    check_same_as_alone(group, "common_state:other_program", "print", 1)
    if group != "2 by TensorFlow":
        for said in GROUPS[group].run(f"{COMMON}:refused_program", "constant", 1):
            assert "different programs" in said


CROSSED = {
    "2": {"workers": 2},
    "3": {"workers": 3},
    "2x2": {"workers": 2, "devices": 2},
    "2 by TensorFlow": {"workers": 2, "native": False},
}


@pytest.mark.parametrize(
    ("group", "kind", "odd"),
    some(
        [
            *itertools.product(["2"], ["crossed", "zeros", "others", "print"], [0, 1]),
            *itertools.product(["3", "2x2", "2 by TensorFlow"], ["crossed"], [1]),
        ],
        always=[("2", "crossed", 1)],
    ),
)
def test_sums_of_a_custom_loop_in_another_order(group, kind, odd):
    ranks = Ranks(**CROSSED[group]) if kind == "crossed" else GROUPS[group]
    try:
        everyone = ranks.run(f"{COMMON}:crossed_in_a_loop", kind, odd)
    finally:
        if kind == "crossed":
            ranks.stop()  # No group survives that.
    for said in everyone:
        if kind == "crossed":
            assert "pass values to their collectives in different orders, in " in said
            assert "loop (common_state.py:" in said
            if group != "2x2":  # Each of its devices passes a part.
                assert "Mean (common_state.py:" in said and "Max (common_state.py:" in said
        else:
            assert said == ""


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 64, 600])
def test_numbers_are_compared_by_their_sums(workers):
    generator = np.random.default_rng(workers)
    for _ in range(20):
        number = int(generator.integers(0, 2**30))
        told = np.array([step_exchange._compared(number)] * workers, np.int64)
        assert not differ(told)
        rank, bit = generator.integers(0, workers), generator.integers(0, 30)
        told[rank] = step_exchange._compared(number ^ (1 << int(bit)))
        assert differ(told) == (workers > 1)


def differ(told):
    numbers = np.concatenate([[0] * 6, told.sum(axis=0), np.zeros(8, np.int64)])
    sums = tf.constant(numbers.astype(np.uint32).view(np.int32))
    found = as_heard(heard(sums, tf.constant(len(told)), 0).numpy().tolist())
    assert found[:2] == (Request(0), False) and not found.program_differs
    return found.state_differs


def test_requests_of_any_number_of_workers_and_steps_are_heard():
    """Sums of many requests, which were once packed into 15 bits, do not run into one another."""
    for asking in ([Request.SAVE_AND_EXIT], [Request.CHANGE_GROUP], list(Request), []):
        exchange = StepExchange()
        with contextlib.ExitStack() as during:
            for request in asking:
                during.enter_context(exchange.asking(request, lambda: True))
            exchange.publish()
        told = tf.concat([exchange.in_graph(), step_exchange.untraced()], axis=0)
        for workers, steps in ((32, 1024), (64, 512), (2, 1)):
            once = heard(told * workers, tf.constant(workers), 0)
            found = as_heard((once * steps).numpy().tolist())
            assert [request for request in Request if request in found.asked] == asking
            assert not any(found[1:])


def test_requests_are_read_again_in_each_step():
    exchange, waiting = StepExchange(), []
    with exchange.asking(Request.CHANGE_GROUP, lambda: bool(waiting)):
        for now in ([], ["one"], ["one", "another"], []):
            waiting[:] = now
            exchange.publish()
            told = exchange.in_graph().numpy()[: len(Request)]
            assert bool(told.any()) == bool(now)
            exchange.grant(exchange.wanted)
            assert exchange.is_granted(Request.CHANGE_GROUP) == bool(now)
        exchange.grant(Request.CHANGE_GROUP)
    assert not exchange.wanted and not exchange.is_granted(Request.CHANGE_GROUP)
