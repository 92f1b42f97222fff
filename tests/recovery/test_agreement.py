"""Which step stands, and who takes whose state: decided alike on all workers."""

import random

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.recovery.agreement import Agreement, FitProgress, agree
from tfdist.errors import GroupLostError


def test_the_step_of_the_one_that_is_furthest_stands():
    standings = [
        FitProgress(is_torn=True, steps=8, epochs_ended=1),
        FitProgress(steps=7, epochs_ended=1, seen=9),
        FitProgress(steps=8, epochs_ended=2, seen=3),
        FitProgress(steps=8, epochs_ended=1, seen=1),
        FitProgress(is_new=True),
    ]
    takers = frozenset({0, 1, 4})
    assert agree(standings) == Agreement(
        steps=8,
        source=2,
        sources=(2,) * 5,
        takers=takers,
        redo=frozenset(),
        newcomers=frozenset({4}),
        epoch=1,
        seen=3,
    )
    assert agree([FitProgress.from_json(one.to_json()) for one in standings]) == agree(standings)


def test_somebody_must_have_the_state():
    for others in ([], [FitProgress(is_new=True)], [FitProgress(is_torn=True, steps=9)]):
        with pytest.raises(GroupLostError, match="No remaining worker has the training state"):
            agree([FitProgress(is_torn=True, steps=3), *others])


@exhaustive
def test_each_part_of_the_model_comes_from_one_who_holds_it():
    standings = [
        FitProgress(steps=7, can_redo=True),
        FitProgress(steps=8),
        FitProgress(is_new=True),
        FitProgress(steps=7),
    ]
    found = agree(standings, [(2, 0), (3, 1)])
    assert found.sources == (0, 1, 0, 1)
    assert (found.redo, found.takers) == ({0}, {2, 3})
    with pytest.raises(GroupLostError, match="Only lost workers held some stages of the model"):
        agree(standings, [(0, 1, 3), (2,)])


def test_whatever_the_workers_say_a_whole_and_newest_state_is_taken():
    choose = random.Random(0)
    for _ in range(2000):
        standings = [
            FitProgress(
                is_new=choose.random() < 0.2,
                is_torn=choose.random() < 0.2,
                steps=choose.choice([10, 11]),
                epochs_ended=choose.choice([1, 2]),
            )
            for _ in range(choose.randint(1, 6))
        ]
        whole = [s for s in standings if not s.is_new and not s.is_torn]
        if not whole:
            continue
        agreement = agree(standings)
        assert agreement.steps == max(s.steps for s in whole)
        for rank, standing in enumerate(standings):
            has_it = standing in whole and standing.steps == agreement.steps
            assert has_it == (rank not in agreement.takers)
        assert agreement.source not in agreement.takers
        assert agreement.epoch == min(s.epochs_ended for s in standings if not s.is_new)
