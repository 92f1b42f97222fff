"""Which workers of an elastic job are replaced, when it ends, and with which code: tables."""

from __future__ import annotations

import json
import random
import signal
from dataclasses import asdict

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.launch.hosts.newcomers import HostInfo, late_rejection
from tfdist._src.launch.job.failure import (
    Loss,
    decisive,
    decode,
    describe_end,
    describe_loss,
    lost_host,
    stopped_by,
    worker_failure,
)
from tfdist._src.launch.job.shutdown import Grace
from tfdist._src.launch.job.spares import spare_settings
from tfdist._src.launch.job.worker import WorkerPlan
from tfdist._src.launch.restart_one import RestartOne, WorkerCounts, job_code
from tfdist._src.launch.restart_policy import End, PrintMessage, Start, Stop
from tfdist._src.options import PREEMPTED
from tfdist._src.progress_file import Progress, UncaughtException

LIMIT = 3


def failed(step=None, *raised, rank=1, status=1, message="bad"):
    progress = Progress(step, UncaughtException(raised, (), message) if raised else None)
    return worker_failure(host=0, rank=rank, status=status, tail=(), log="log", progress=progress)


AGAIN = "it has failed in the same way at the same step before"

# The failures of one worker so far, and its delay, or why it is not replaced.
REPLACEMENTS = [
    ([failed()], 0.0),
    ([failed(7, status=-9)], 0.0),
    ([failed(7), failed(9)], 0.0),
    ([failed(7), failed(6)], 1.0),
    ([failed(7), failed(6), failed(5)], 2.0),
    ([failed(7), failed(6), failed(9)], 0.0),
    ([failed(7), failed(7)], AGAIN),
    ([failed(7, "PeerLostError", "RuntimeError")], 0.0),
    ([failed(status=2)], "exit code 2, a usage error, would recur"),
    ([failed(None, "ImportError")], "an ImportError would recur"),
    ([failed(None, "TypeError")], "a TypeError before the first step would recur"),
    ([failed(7), failed(8), failed(9), failed(10)], "--max-restarts 3 is reached"),
]


def make(*ranks, hosts=(), limit=LIMIT, **how):
    grace = Grace.given(None)
    policy = RestartOne(ranks, 0, hosts, grace, limit=limit, now=0.0, silence=10.0, **how)
    policy.take()
    return policy


def advance(policy, now):
    """The ranks of the workers that are started, and that are stopped."""
    policy.advance(now)
    actions = policy.take()
    starts = [action.rank for action in actions if isinstance(action, Start)]
    stops = [rank for action in actions if isinstance(action, Stop) for rank in action.ranks]
    return starts, stops


def last_loss(failures, limit=LIMIT, *, completed=False):
    """Lets a worker fail again and again; returns the last loss, and its delay."""
    policy, now, delay = make(0, 1, limit=limit), 0.0, 0.0
    for number, failure in enumerate(failures, 1):
        now += delay + 9.0
        if completed and number == len(failures):
            policy.exited(0, None, now)
        policy.exited(1, failure, now)
        delay = (policy.next_time or now) - now
        policy.advance(now + delay)
    return policy.losses[-1], delay


def test_who_is_replaced_and_when():
    for failures, expected in REPLACEMENTS:
        loss, delay = last_loss(failures)
        if isinstance(expected, float):
            when = f"in {expected:g} s" if expected else "at once"
            fate = f"replaced {when} ({len(failures)} of {LIMIT})"
            assert (loss, delay) == (Loss(failures[-1], fate, final=False), expected)
        else:
            assert loss == Loss(failures[-1], f"not replaced: {expected}", final=True)
        loss, _ = last_loss(failures, completed=True)
        assert (loss.fate, loss.late) == ("not replaced: the training is complete", True)
    assert last_loss([failed()], limit=0)[0].fate == "not replaced: --max-restarts is 0"


def test_a_worker_is_replaced_and_joins():
    policy = make(0, 1)
    policy.exited(1, failed(7, status=-9), 5.0)
    assert policy.losses == [Loss(failed(7, status=-9), "replaced at once (1 of 3)", final=False)]
    assert policy.counts == WorkerCounts(members=1, waiting=1)
    assert advance(policy, 5.0) == ([1], [])
    assert policy.counts == WorkerCounts(members=1, joining=1)
    policy.exited(1, failed(6), 9.0)
    assert policy.losses[-1].fate == "replaced in 1 s (2 of 3)"
    assert advance(policy, 9.9) == ([], []) and policy.next_time == 10.0
    assert advance(policy, 10.0) == ([1], [])
    assert policy.joining == [1]
    policy.trained(1)
    assert policy.counts == WorkerCounts(members=2)
    policy.exited(0, None, 11.0)
    assert advance(policy, 11.0) == ([], [])
    policy.exited(1, None, 12.0)
    policy.advance(12.0)
    assert policy.counts == WorkerCounts(completed=2)
    assert policy.take()[-1].code == 0


@exhaustive
def test_a_replacement_that_never_joined_is_not_needed_in_the_end():
    policy = make(0, 1, 2, hosts=[1])
    for rank in (1, 2):
        policy.exited(rank, failed(7, rank=rank), 1.0)
        policy.exited(rank, failed(6, rank=rank), 1.0) if rank == 2 else advance(policy, 1.0)
    policy.exited(0, None, 1.5)
    # Another host still trains: the replacement may still join, but no other one starts.
    assert advance(policy, 99.0) == ([], [])
    assert policy.counts == WorkerCounts(joining=1, completed=1)
    policy.received(1, "counts", asdict(WorkerCounts(completed=1)), 99.0)
    assert advance(policy, 99.0) == ([], [1])
    policy.exited(1, failed(status=-15), 99.0)
    assert policy.counts == WorkerCounts(completed=1) and len(policy.losses) == 3


@exhaustive
def test_a_replacement_is_not_needed_when_the_others_have_left():
    policy = make(0, 1)
    policy.exited(1, failed(7), 1.0)
    assert advance(policy, 1.0) == ([1], [])
    policy.exited(0, failed(7, status=PREEMPTED), 2.0)
    assert advance(policy, 2.0) == ([], [1])
    policy.exited(1, failed(status=-15), 3.0)
    assert policy.counts == WorkerCounts(left=1) and len(policy.losses) == 1


@exhaustive
def test_a_replacement_that_is_stopped_already_is_not_stopped_more_gently():
    policy = make(0, 1, hosts=[1])
    policy.exited(1, failed(7), 1.0)
    assert advance(policy, 1.0) == ([1], [])
    policy.signaled(signal.SIGINT, stopped_by(0, signal.SIGINT), 2.0)
    assert advance(policy, 2.0) == ([], [0, 1])
    policy.exited(0, failed(7, status=-2), 3.0)
    policy.received(1, "counts", asdict(WorkerCounts(left=1)), 3.0)
    assert advance(policy, 3.0) == ([], [])


@exhaustive
def test_workers_that_are_suspended_for_long_are_killed():
    policy = make(0, 1, 2)

    def look(now, *ranks):
        policy.suspended(ranks, now)
        actions = policy.take()
        stops = [action for action in actions if isinstance(action, Stop)]
        assert all(stop.first == signal.SIGKILL for stop in stops)
        texts = [action.text for action in actions if isinstance(action, PrintMessage)]
        return [rank for stop in stops for rank in stop.ranks], texts

    assert [look(now, 1) for now in (0.0, 14.0)] == [([], [])] * 2
    assert policy.next_look == 15.0
    assert look(15.0) == ([], [])  # It has been resumed.
    assert [look(now, 1) for now in (20.0, 34.0)] == [([], [])] * 2
    # As a scheduler suspends a job: nobody has given anybody up.
    assert [look(now, 0, 1, 2) for now in (36.0, 99.0)] == [([], [])] * 2
    assert [look(now, 1)[0] for now in (100.0, 114.0, 115.0, 116.0)] == [[], [], [1], []]
    policy.exited(1, failed(7, status=-9), 116.0)
    assert policy.has_failed
    policy.advance(116.0)  # Its replacement starts.
    policy.exited(1, failed(7, status=2), 117.0)
    # The training is complete: the last one is not needed, and is no loss.
    policy.exited(0, None, 118.0)
    policy.advance(118.0)
    policy.take()
    assert look(200.0, 2) == ([], [])
    ranks, (text,) = look(215.0, 2)
    assert ranks == [2] and text.startswith("worker 2 has been stopped (SIGSTOP) for 15 s")
    policy.exited(2, failed(7, status=-9), 216.0)
    policy.advance(216.0)
    assert policy.take()[-1].code == 0


@exhaustive
def test_a_worker_that_leaves_on_request_is_not_replaced():
    policy = make(0, 1)
    policy.exited(1, failed(7, status=PREEMPTED), 1.0)
    assert policy.counts == WorkerCounts(members=1, left=1)
    assert advance(policy, 99.0) == ([], []) and not policy.has_failed


@exhaustive
@pytest.mark.parametrize("here", [False, True])
def test_a_failure_after_the_training_is_complete_counts(here):
    policy = make(0, 1, hosts=[1])
    if here:
        policy.exited(0, None, 1.0)
    policy.received(
        1, "counts", asdict(WorkerCounts(members=int(here), completed=int(not here))), 1.0
    )
    policy.exited(1, failed(7), 2.0)
    (loss,) = policy.losses
    assert loss.late and loss.final
    assert job_code([loss], WorkerCounts(completed=1, lost=1)) == 1


@exhaustive
def test_no_worker_is_replaced_once_the_command_is_stopped():
    policy = make(0, 1)
    policy.exited(1, failed(7), 1.0)
    policy.signaled(signal.SIGTERM, stopped_by(0, signal.SIGTERM), 1.0)
    assert advance(policy, 99.0) == ([], [0])
    policy.exited(0, failed(8, status=-15), 100.0)
    assert len(policy.losses) == 1 and policy.counts.ended


OOM, PEER = failed(7, status=-9), failed(7, "PeerLostError", status=1)
KILLED, VICTIM = Loss(OOM, "", final=True), Loss(PEER, "", final=True)
HEALED = Loss(failed(3, status=-11), "replaced at once (1 of 3)", final=False)
LATE = Loss(failed(9, status=4), "", final=True, late=True)

# What was lost, how the others ended, and the job's exit code.
CODES = [
    ([], WorkerCounts(completed=2), 0),
    ([HEALED], WorkerCounts(completed=2), 0),
    ([KILLED], WorkerCounts(completed=1, lost=1), 0),
    ([KILLED], WorkerCounts(completed=1, left=1, lost=1), 0),
    ([KILLED, LATE], WorkerCounts(completed=1, lost=2), 4),
    ([], WorkerCounts(left=2), PREEMPTED),
    ([KILLED], WorkerCounts(left=1, lost=1), PREEMPTED),
    ([KILLED, VICTIM], WorkerCounts(lost=2), 137),
    ([VICTIM, KILLED], WorkerCounts(lost=2), 137),
    ([HEALED, VICTIM], WorkerCounts(lost=2), 1),
]


def test_the_exit_code():
    for losses, job, code in CODES:
        assert job_code(losses, job) == code, (losses, job)
    assert decisive([VICTIM, KILLED], completed=False, left=False) == OOM


@exhaustive
def test_what_is_told():
    line = describe_loss(Loss(OOM, "not replaced: why", final=True), others=True)
    assert line.endswith("after step 7; not replaced: why. The others continue. Its log: log")
    assert describe_end([], 0, completed=True) == ""
    text = describe_end([HEALED, KILLED], 0, completed=True)
    first, *lines = text.splitlines()
    assert first == "The training is complete. It was completed without worker 1. Failures:"
    assert lines[0].endswith(
        "worker 1 was killed by SIGSEGV, after step 3; replaced at once (1 of 3)"
    )
    assert "continues it" in describe_end([], PREEMPTED, completed=False)
    assert describe_end([KILLED], 137, completed=False).startswith("The job has failed. Failures:")


@exhaustive
def test_what_the_hosts_tell_each_other():
    for message in (WorkerCounts(members=2, lost=1), KILLED, LATE):
        sent = json.loads(json.dumps(asdict(message)))
        assert decode(type(message), sent) == message
        for name in sent:
            with pytest.raises(ValueError):
                decode(type(message), {key: sent[key] for key in sent if key != name})
            with pytest.raises(ValueError):
                decode(type(message), {**sent, name: float("inf")})
    assert WorkerCounts(members=2) + WorkerCounts(left=1) == WorkerCounts(members=2, left=1)
    assert WorkerCounts(members=1, waiting=1, completed=1, lost=1).gone == WorkerCounts(
        completed=1, lost=3
    )


@exhaustive
def test_who_may_come_again():
    here = HostInfo(0, 3, "", (1,), elastic=True)
    layout = {0: ("a", (1,)), 1: ("b", (2, 3)), 2: ("c", (4,))}
    for newcomer, connected, problem in [
        (HostInfo(1, 3, "", (5, 6), elastic=True), {2: "c"}, ""),
        (HostInfo(1, 3, "", (5,), elastic=True), {2: "c"}, "reconnects with 1 worker, but had 2"),
        (HostInfo(1, 3, "", (5, 6), elastic=True), {1: "b"}, "two hosts were started with"),
        (HostInfo(0, 3, "", (5,), elastic=True), {}, "two hosts were started with"),
        (HostInfo(1, 3, "", (5, 6)), {2: "c"}, "host 0 was started with --elastic, host 1 (b) wi"),
        (HostInfo(1, 2, "", (5, 6), elastic=True), {2: "c"}, "pass the same --nnodes"),
        (HostInfo(7, 3, "", (5, 6), elastic=True), {2: "c"}, "must have a --node-rank from 1"),
    ]:
        for sources in (None, {1: "b", 2: "c"}):
            found = late_rejection(newcomer, "b", here, connected, layout, sources)
            assert problem in found and bool(problem) == bool(found)
    again = HostInfo(1, 3, "", (5, 6), elastic=True)
    found = late_rejection(again, "d", here, {2: "c"}, layout, {1: "b", 2: "c"})
    assert found.startswith("host 1 (d) was at b before: ") and "TFDIST_SECRET" in found
    assert not late_rejection(again, "d", here, {2: "c"}, layout)


@exhaustive
def test_a_spare_may_become_any_worker_or_there_is_none():
    def plans(*settings):
        return [
            WorkerPlan(r, ("python",), {"TF_CONFIG": str(r), **s}) for r, s in enumerate(settings)
        ]

    for settings, gpus, expected in [
        ([{"A": "1"}, {"A": "1"}], [], {"A": "1"}),
        ([{"CUDA_VISIBLE_DEVICES": ""}] * 2, ["0"], {"CUDA_VISIBLE_DEVICES": ""}),
        ([{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}], ["0", "1"], None),
        ([{}], ["0"], None),
        ([{"A": "1"}, {"A": "2"}], [], None),
    ]:
        found, problem = spare_settings(plans(*settings), gpus)
        assert found == expected
        assert bool(problem) == (expected is None)


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=exhaustive)])
def test_every_job_ends_with_a_code_that_its_history_explains(count):
    """Random jobs of one host, until nothing runs any more."""
    for seed in range(count):
        rng = random.Random(seed)
        limit = rng.randrange(4)
        ranks = range(rng.randrange(1, 4))
        policy, now, code = make(*ranks, limit=limit), 0.0, None
        running, starts = set(ranks), dict.fromkeys(ranks, 1)
        while code is None:
            now += rng.choice([0.1, 1.0, 700.0])
            policy.advance(now)
            for action in policy.take():
                if isinstance(action, Start):
                    assert not policy.counts.completed
                    starts[action.rank] += 1
                    running.add(action.rank)
                elif isinstance(action, Stop):
                    for rank in action.ranks:
                        running.discard(rank)
                        count_before = len(policy.losses)
                        policy.exited(rank, failed(status=-15), now)
                        assert len(policy.losses) == count_before
                elif isinstance(action, End):
                    code = action.code
            if not running:
                continue
            rank = rng.choice(sorted(running))
            if rng.random() < 0.5:
                policy.trained(rank)
                continue
            status = rng.choice([0, 1, 1, 1, 2, -9, PREEMPTED])
            running.discard(rank)
            failure = failed(rng.randrange(9), rank=rank, status=status) if status else None
            policy.exited(rank, failure, now)
        assert policy.counts.ended and not running
        assert all(number <= limit + 1 for number in starts.values())
        job, late = policy.counts, any(loss.late for loss in policy.losses)
        assert (code == 0) == (job.completed > 0 and not late)
        if code == PREEMPTED:
            assert job.left and not job.completed


@exhaustive
@pytest.mark.parametrize(
    ("num_hosts", "others", "replaced"), [(3, [], True), (2, [], False), (2, [2], True)]
)
def test_no_worker_is_replaced_if_none_is_left_to_join(num_hosts, others, replaced):
    policy = RestartOne(
        [1, *others],
        1,
        [0],
        Grace.given(None),
        limit=LIMIT,
        now=0.0,
        silence=10.0,
        num_hosts=num_hosts,
    )
    policy.lost(0, lost_host(0, "a"), 8.0)
    policy.exited(1, failed(7, "GroupLostError"), 9.0)
    (loss,) = policy.losses
    assert ("host 0 is lost, and no other worker remains" in loss.fate) != replaced
    assert policy.counts.waiting == replaced
