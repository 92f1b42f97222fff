"""The workers' state machines in random histories of deaths, cuts, stops, joins and messages."""

import collections

import pytest

from tests.tiers import exhaustive
from tfdist.cluster.membership import consensus, quorum
from tfdist.cluster.membership.consensus import Standing

from .world import World

ACTIONS = 250


def play(seed, world=World):
    """One history; returns what came of it."""
    history = world(seed)
    for _ in range(ACTIONS):
        history.act()
    settled = history.settle()
    return max(history.decided), history.effective, settled


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=exhaustive)])
def test_at_most_one_group_trains_and_one_does_if_it_can(count):
    generations = collections.Counter()
    trained = settled = 0
    for seed in range(count):
        try:
            last, effective, ended = play(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        generations[last] += 1
        trained += effective > 0
        settled += ended
    # The histories are not idle.
    assert settled > 0.6 * count
    assert trained > 0.6 * count
    assert sum(n for last, n in generations.items() if last >= 3) > 0.3 * count


def splits(world=World):
    with pytest.raises(AssertionError, match="two "):
        for seed in range(20_000):
            play(seed, world)


def half_is_enough(view, present, dead):
    return 2 * len([m for m in view if m in present]) >= len(view)


def the_dead_do_not_count(view, present, dead):
    return quorum.may_go_on([m for m in view if m not in dead] or view, present, ())


class Unread(World):
    """Deaths count without the last word of the dead."""

    def bury_one(self, proposer, dead):
        proposer.bury(dead.name, Standing(proposer.view))


@pytest.mark.parametrize("rule", [half_is_enough, the_dead_do_not_count])
def test_a_weaker_rule_splits(monkeypatch, rule):
    monkeypatch.setattr(consensus, "may_go_on", rule)
    splits()


def test_deaths_without_a_last_word_split():
    splits(Unread)
