"""The workers' state machines in random histories of deaths, cuts, stops, joins and messages.

Some workers are stuck: they answer the others, but arrive nowhere, and are left out.
"""

import collections

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.cluster.membership import consensus
from tfdist._src.cluster.membership.consensus import AcceptorState

from .world import World

ACTIONS = 250
RULE = consensus.may_go_on


def play(seed, world=World):
    """One history; returns what came of it."""
    history = world(seed)
    for _ in range(ACTIONS):
        history.act()
    settled = history.settle(stuck=seed % 2 == 1)
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
    """Whether some history has two views where there may be one."""
    for seed in range(20_000):
        try:
            play(seed, world)
        except AssertionError as error:
            if "two " in str(error):
                return True
    return False


class Unread(World):
    """Deaths count without the last word of the dead."""

    def bury_one(self, proposer, dead):
        proposer.bury(dead.name, AcceptorState(proposer.view))


class Rumoured(World):
    """A process that cannot be reached counts as dead, with the last word that somebody knows."""

    def counts_as_dead(self, process, other):
        return not other.alive or other.stopped or other.side != process.side


class Impatient(World):
    """Those that leave some out propose a view without them, whatever may have been accepted."""

    def propose_view(self, process, proposer, view):
        if process.absent:
            proposer._bound = None
        proposer.propose(view)


class Alone(World):
    """Those that wait in vain go on without the others' votes."""

    def propose_view(self, process, proposer, view):
        proposer.propose(view)
        if process.absent:
            proposer._decide(proposer.proposal)


def half_is_enough(view, present, dead):
    return 2 * len([m for m in view if m in present]) >= len(view)


def the_dead_do_not_count(view, present, dead):
    return RULE([m for m in view if m not in dead] or view, present, ())


@exhaustive
@pytest.mark.parametrize(
    ("world", "rule"),
    [
        (World, half_is_enough),
        (Unread, the_dead_do_not_count),
        (Unread, RULE),
        (Rumoured, RULE),
        (Impatient, RULE),
        (Alone, RULE),
    ],
)
def test_the_histories_find_what_a_weaker_rule_breaks(monkeypatch, world, rule):
    monkeypatch.setattr(consensus, "may_go_on", rule)
    assert splits(world)
