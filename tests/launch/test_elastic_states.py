"""Which workers of an elastic job are replaced, when it ends, and with which code: tables."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest

from tests.tiers import exhaustive
from tfdist.exit_codes import PREEMPTED
from tfdist.launch.elastic import paused_workers
from tfdist.launch.elastic.job import spare_settings
from tfdist.launch.elastic.replacements import GoOnWithout, Replace, decide_replacement
from tfdist.launch.elastic.report import describe_end, describe_loss
from tfdist.launch.elastic.worker_states import State, WorkerStates
from tfdist.launch.hosts.elastic_hosts import job_code
from tfdist.launch.hosts.host_info import HostInfo
from tfdist.launch.hosts.late_hosts import late_rejection
from tfdist.launch.hosts.worker_counts import WorkerCounts, total
from tfdist.launch.job.decoding import decode
from tfdist.launch.job.failure import worker_failure
from tfdist.launch.job.losses import Loss, decisive
from tfdist.launch.job.plan import WorkerPlan
from tfdist.launch.job.restarts import Ended
from tfdist.progress_file import Progress, Raised

LIMIT = 3


def failed(step=None, *raised, rank=1, status=1, message="bad"):
    progress = Progress(step, Raised(raised, (), message) if raised else None)
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
    ([failed(status=2)], "exit code 2, a usage error, would come again"),
    ([failed(None, "ImportError")], "an ImportError would come again"),
    ([failed(None, "TypeError")], "a TypeError before the first step would come again"),
    ([failed(7), failed(8), failed(9), failed(10)], "--max-restarts 3 is reached"),
]


def test_who_is_replaced_and_when():
    for failures, expected in REPLACEMENTS:
        history = [Ended(failure, 9.0) for failure in failures]
        found = decide_replacement(history, LIMIT, completed=False)
        if isinstance(expected, float):
            assert found == Replace(expected, len(failures)), failures
        else:
            assert found == GoOnWithout(expected), failures
        assert decide_replacement(history, LIMIT, completed=True) == GoOnWithout(
            "the training is complete"
        )
    assert decide_replacement([Ended(failed(), 9.0)], 0, completed=False) == GoOnWithout(
        "--max-restarts is 0"
    )


def test_a_worker_is_replaced_and_joins():
    states = WorkerStates([0, 1], LIMIT, now=0.0)
    loss = states.ended(1, failed(7, status=-9), WorkerCounts(), now=5.0)
    assert loss == Loss(failed(7, status=-9), "replaced at once (1 of 3)", final=False)
    assert states.counts == WorkerCounts(members=1, waiting=1)
    assert states.due(5.0) == [1]
    states.started(1, 5.0)
    assert states.counts == WorkerCounts(members=1, joining=1)
    loss = states.ended(1, failed(6), WorkerCounts(), now=9.0)
    assert loss is not None and loss.fate == "replaced in 1 s (2 of 3)"
    assert (states.due(9.9), states.next_time, states.due(10.0)) == ([], 10.0, [1])
    states.started(1, 10.0)
    states.trains(1)
    assert states.counts == WorkerCounts(members=2)
    assert states.ended(0, None, WorkerCounts(), now=11.0) is None
    assert states.heed(WorkerCounts(members=1, completed=1)) == []
    assert states.ended(1, None, WorkerCounts(), now=12.0) is None
    assert states.counts == WorkerCounts(completed=2) and states.counts.ended


@exhaustive
def test_a_replacement_that_never_joined_is_of_no_use_in_the_end():
    states = WorkerStates([0, 1, 2], LIMIT, now=0.0)
    for rank in (1, 2):
        states.ended(rank, failed(7, rank=rank), WorkerCounts(), now=1.0)
    states.started(1, 1.0)
    states.ended(0, None, WorkerCounts(), now=2.0)
    # Another host still trains: the replacement may still join, but no other one starts.
    assert states.heed(WorkerCounts(members=1, joining=1, completed=1)) == []
    assert states.due(99.0) == [] and states.of(State.UNNEEDED) == [2]
    assert states.heed(WorkerCounts(joining=1, completed=1)) == [1]
    assert states.ended(1, failed(status=-15), WorkerCounts(completed=1), now=3.0) is None
    assert states.counts == WorkerCounts(completed=1)


@exhaustive
def test_a_replacement_is_of_no_use_when_the_others_have_left():
    states = WorkerStates([0, 1], LIMIT, now=0.0)
    states.ended(1, failed(7), WorkerCounts(), now=1.0)
    assert states.heed(WorkerCounts(members=1, waiting=1)) == []
    states.started(1, 1.0)
    states.ended(0, failed(7, status=PREEMPTED), WorkerCounts(), now=2.0)
    assert states.heed(states.counts) == [1]
    assert states.ended(1, failed(status=-15), WorkerCounts(left=1), now=3.0) is None
    assert states.counts == WorkerCounts(left=1)


class Process:
    def __init__(self, pid, all_stopped):
        self.pid, self.signals, self._all_stopped = pid, [], all_stopped

    @property
    def stopped(self):
        return self.pid in self._all_stopped

    def signal(self, number):
        self.signals.append(number)


@exhaustive
def test_workers_that_are_stopped_for_long_are_killed(capsys):
    stopped = set()
    running = {rank: Process(100 + rank, stopped) for rank in range(3)}
    states, job = WorkerStates(running, LIMIT, now=0.0), WorkerCounts(members=3)
    paused = paused_workers.PausedWorkers(10.0)

    def look(now):
        paused.end(running, states, job, now)
        return [rank for rank, process in running.items() if process.signals]

    stopped.add(101)
    assert [look(now) for now in (0.0, 0.5, 14.0)] == [[], [], []]
    assert paused.next_time == 15.0
    stopped.clear()  # It has gone on.
    assert look(15.0) == []
    stopped.add(101)
    assert [look(now) for now in (20.0, 34.0)] == [[], []]
    stopped.update({100, 102})  # As a scheduler suspends a job: nobody has given anybody up.
    assert [look(now) for now in (36.0, 99.0)] == [[], []]
    stopped.difference_update({100, 102})
    assert [look(now) for now in (100.0, 114.0, 115.0)] == [[], [], [1]]
    assert "worker 1 has been stopped (SIGSTOP) for 15 s" in capsys.readouterr().err
    assert states.ended(1, failed(7, status=-9), job, now=116.0) is not None
    # The training is complete: the last one is of no use, and no loss.
    job, running = WorkerCounts(members=1, completed=2), {2: running[2]}
    stopped.add(102)
    assert [look(now) for now in (200.0, 215.0)] == [[], [2]]
    assert states.ended(2, failed(7, status=-9), job, now=216.0) is None


@exhaustive
def test_who_leaves_on_request_is_not_replaced():
    states = WorkerStates([0, 1], LIMIT, now=0.0)
    assert states.ended(1, failed(7, status=PREEMPTED), WorkerCounts(), now=1.0) is None
    assert states.counts == WorkerCounts(members=1, left=1)
    assert states.due(99.0) == []


@exhaustive
def test_a_failure_after_the_training_is_complete_counts():
    for job, own in [(WorkerCounts(completed=1), False), (WorkerCounts(), True)]:
        states = WorkerStates([0, 1], LIMIT, now=0.0)
        if own:
            states.ended(0, None, WorkerCounts(), now=1.0)
        loss = states.ended(1, failed(7), job, now=2.0)
        assert loss is not None and loss.late and loss.final
        assert job_code([loss], WorkerCounts(completed=1, lost=1)) == 1


@exhaustive
def test_nobody_is_replaced_once_the_command_is_stopped():
    states = WorkerStates([0, 1], LIMIT, now=0.0)
    states.ended(1, failed(7), WorkerCounts(), now=1.0)
    states.stop()
    assert states.due(99.0) == []
    assert states.ended(0, failed(8, status=-15), WorkerCounts(), now=2.0) is None
    assert states.counts.ended


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
    assert line.endswith("after step 7; not replaced: why. The others go on. Its log: log")
    assert describe_end([], WorkerCounts(completed=2), 0) == ""
    text = describe_end([HEALED, KILLED], WorkerCounts(completed=1, lost=1), 0)
    first, *lines = text.splitlines()
    assert first == "The training is complete. It was completed without worker 1. Failures:"
    assert lines[0].endswith(
        "worker 1 was killed by SIGSEGV, after step 3; replaced at once (1 of 3)"
    )
    assert "continues it" in describe_end([], WorkerCounts(left=2), PREEMPTED)
    assert describe_end([KILLED], WorkerCounts(lost=1), 137).startswith(
        "The job has failed. Failures:"
    )


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
    assert total([WorkerCounts(members=2), WorkerCounts(left=1)]) == WorkerCounts(members=2, left=1)
    assert WorkerCounts(members=1, waiting=1, completed=1, lost=1).gone == WorkerCounts(
        completed=1, lost=3
    )


@exhaustive
def test_who_may_come_again():
    here = HostInfo(0, 3, "", (1,), elastic=True)
    layout = {0: ("a", (1,)), 1: ("b", (2, 3)), 2: ("c", (4,))}
    for newcomer, connected, problem in [
        (HostInfo(1, 3, "", (5, 6), elastic=True), {2: "c"}, ""),
        (HostInfo(1, 3, "", (5,), elastic=True), {2: "c"}, "comes again with 1 worker, but had 2"),
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


@pytest.mark.parametrize("count", [300, pytest.param(10000, marks=exhaustive)])
def test_every_job_ends_with_a_code_that_its_history_explains(count):
    """Random jobs of one host, until nothing runs any more."""
    for seed in range(count):
        rng = random.Random(seed)
        limit = rng.randrange(4)
        states = WorkerStates(range(rng.randrange(1, 4)), limit, now=0.0)
        losses, now, starts = [], 0.0, dict.fromkeys(states.of(State.MEMBER), 1)
        running = set(starts)
        for _ in range(1000):
            for rank in states.heed(states.counts):
                running.discard(rank)
                assert states.ended(rank, failed(status=-15), WorkerCounts(), now) is None
            if states.counts.ended:
                break
            now += rng.choice([0.1, 1.0, 700.0])
            for rank in states.due(now):
                assert not states.counts.completed
                states.started(rank, now)
                starts[rank] += 1
                running.add(rank)
            if not running:
                continue
            rank = rng.choice(sorted(running))
            if rng.random() < 0.5:
                states.trains(rank)
                continue
            status = rng.choice([0, 1, 1, 1, 2, -9, PREEMPTED])
            failure = failed(rng.randrange(9), rank=rank, status=status) if status else None
            running.discard(rank)
            loss = states.ended(rank, failure, states.counts, now)
            if loss is not None:
                losses.append(loss)
        assert states.counts.ended and not running
        assert all(number <= limit + 1 for number in starts.values())
        job = states.counts
        code = job_code(losses, job)
        assert (code == 0) == (job.completed > 0 and not any(loss.late for loss in losses))
        if code == PREEMPTED:
            assert job.left and not job.completed


@exhaustive
def test_nobody_is_replaced_where_nobody_is_left_to_join():
    for alone, others, state in [
        (False, [], State.WAITING),
        (True, [], State.LOST),
        (True, [2], State.WAITING),
    ]:
        states = WorkerStates([1, *others], LIMIT, 0.0)
        loss = states.ended(1, failed(7, "GroupLostError"), WorkerCounts(), 9.0, alone=alone)
        assert 1 in states.of(state)
        assert ("host 0 is lost, and no worker is left" in loss.fate) == (state == State.LOST)
