"""The decision to start again, and what each policy does: tables and random histories."""

from __future__ import annotations

import dataclasses
import json
import random
import signal

import pytest

from tests.harness.tiers import exhaustive, some
from tfdist._src.launch.job.failure import Failure, decode, lost_host, stopped_by, worker_failure
from tfdist._src.launch.restart_all import HostEnd, RestartDecision
from tfdist._src.launch.restart_policy import (
    _LONG,
    Begin,
    Ended,
    GiveUp,
    Restart,
    all_saved,
    decide,
)
from tfdist._src.options import PREEMPTED
from tfdist._src.progress_file import Progress, UncaughtException

LIMIT = 5


def failed(step=None, *raised, rank=1, status=1, message="bad"):
    error = UncaughtException(raised, (), message) if raised else None
    progress = Progress(step, error)
    return worker_failure(host=0, rank=rank, status=status, tail=(), log="log", progress=progress)


def after(*failures, limit=LIMIT, seconds=9.0):
    return decide([Ended(failure, seconds) for failure in failures], limit)


OS_ERROR = ("FileNotFoundError", "OSError")
A_SIGSEGV = failed(7, status=-11)
AGAIN = "it has failed in the same way at the same step before"
AT_FIRST = "it has failed in the same way before its first step before"
PORTS = [f"port {port} at {hex(port)}" for port in (4000, 517)]

# The failures so far, and why the job is not started again; None if it is.
CASES = [
    # Once.
    ([failed()], None),
    ([failed(7)], None),
    ([failed(status=-9)], None),
    ([failed(None, *OS_ERROR)], None),
    ([failed(7, "PeerLostError", "TfdistError", "RuntimeError")], None),
    ([failed(status=PREEMPTED)], None),
    # What would recur.
    ([failed(status=2)], "exit code 2, a usage error, would recur"),
    ([failed(7, status=2)], "exit code 2, a usage error, would recur"),
    ([failed(7, "ModuleNotFoundError", "ImportError")], "a ModuleNotFoundError would recur"),
    ([failed(7, "MyError", "ImportError")], "an ImportError would recur"),
    ([failed(None, "IndentationError", "SyntaxError")], "an IndentationError would recur"),
    ([failed(None, "ClusterError", "TfdistError", "ValueError")], "a ClusterError would"),
    ([failed(9, "ProgramMismatchError")], "a ProgramMismatchError would recur"),
    ([failed(None, "JSONDecodeError", "ValueError")], "a ValueError before the first step"),
    ([failed(None, "UnboundLocalError", "NameError")], "a NameError before the first step"),
    ([failed(1, "ValueError")], None),
    ([failed(1), failed(None, "ValueError")], None),
    ([lost_host(1, "10.0.0.2")], "a host that is lost cannot be started again from here"),
    ([stopped_by(0, signal.SIGTERM)], ""),
    ([stopped_by(1, signal.SIGINT)], ""),
    # Twice.
    ([A_SIGSEGV, A_SIGSEGV], AGAIN),
    ([A_SIGSEGV, failed(7, status=-11, rank=0)], AGAIN),
    ([A_SIGSEGV, failed(3), A_SIGSEGV], AGAIN),
    ([A_SIGSEGV, failed(7, status=-9)], None),
    ([A_SIGSEGV, failed(8, status=-11)], None),
    ([A_SIGSEGV, failed(status=-11)], None),
    ([failed(), failed()], AT_FIRST),
    ([failed(None, *OS_ERROR), failed(None, *OS_ERROR)], AT_FIRST),
    ([failed(None, *OS_ERROR), failed(None, "PermissionError", "OSError")], None),
    ([failed(7, "OSError"), failed(7, "OSError", message="worse")], None),
    ([failed(7, "OSError", message=message) for message in PORTS], AGAIN),
    # The limit.
    ([failed(step) for step in range(1, 6)], None),
    ([failed(step) for step in range(1, 7)], "--max-restarts 5 is reached"),
]


def test_again_or_not():
    for failures, reason in CASES:
        decision = after(*failures)
        if reason is None:
            assert isinstance(decision, Restart), failures
        else:
            assert isinstance(decision, GiveUp), failures
            assert decision.reason.startswith(reason)
        assert after(*failures, limit=0) == GiveUp("")


def test_what_trains_unseen_may_fail_in_the_same_way_again():
    """A custom loop counts no steps."""
    long, short = Ended(failed(status=-9), _LONG), Ended(failed(status=-9), 9.0)
    assert isinstance(decide([long, long], LIMIT), Restart)
    assert isinstance(decide([short, long], LIMIT), Restart)
    assert isinstance(decide([long, short, short], LIMIT), GiveUp)
    known = Ended(A_SIGSEGV, _LONG)
    assert isinstance(decide([known, known], LIMIT), GiveUp)


@pytest.mark.parametrize(
    ("steps", "delays"),
    some(
        [
            ([5, 6, 7], [1, 1, 1]),
            ([5, 4, 3], [1, 2, 4]),
            ([5, 4, 9, 8, 7], [1, 2, 1, 2, 4]),
            ([None, 2, 1], [1, 1, 2]),
            (list(range(9, 0, -1)), [1, 2, 4, 8, 16, 32, 60, 60, 60]),
        ],
        always=[([5, 4, 9, 8, 7], [1, 2, 1, 2, 4])],
    ),
)
def test_the_delay_doubles_until_there_is_progress(steps, delays):
    failures = [failed(step) for step in steps]
    found = [after(*failures[: n + 1], limit=99) for n in range(len(steps))]
    assert found == [Restart(delay) for delay in delays]


@exhaustive
def test_a_generation_that_ran_for_long_has_made_progress():
    history = [Ended(failed(5), 9.0), Ended(failed(4), 9.0), Ended(failed(), _LONG)]
    assert decide(history, LIMIT) == Restart(1)


def histories(count):
    """Random jobs: each starts again until it is told not to."""
    for seed in range(count):
        rng = random.Random(seed)
        limit = rng.randrange(6)
        history: list[Ended] = []
        decision: Restart | GiveUp = Restart(0)
        while isinstance(decision, Restart):
            raised = rng.choice([(), OS_ERROR, ("ValueError",), ("ImportError",)])
            status = rng.choice([1, 1, 1, 2, 3, -9, -11, PREEMPTED])
            step = rng.choice([None, None, 3, 4, 5, 100])
            failure = failed(step, *raised, status=status, rank=rng.randrange(3))
            others = [stopped_by(0, signal.SIGTERM), lost_host(1, "a")]
            failure = rng.choice([*[failure] * 9, *others])
            history.append(Ended(failure, rng.choice([1.0, 60.0, _LONG])))
            decision = decide(history, limit)
            yield history, limit, decision


@pytest.mark.parametrize("count", [500, pytest.param(20000, marks=exhaustive)])
def test_every_job_ends_within_its_limit_and_its_delays(count):
    for history, limit, decision in histories(count):
        failure = history[-1].failure
        assert len(history) <= limit + 1
        if isinstance(decision, GiveUp):
            assert bool(decision.reason) == (limit > 0 and not failure.stopped)
            continue
        assert len(history) <= limit
        assert 1 <= decision.delay <= min(60, 2 ** (len(history) - 1))
        assert failure.rank is not None and failure.status != 2
        assert not {"ImportError", "SyntaxError"} & set(failure.classes)
        known = [
            (ended.failure.step, ended.failure.status, ended.failure.classes)
            for ended in history
            if ended.failure.step or ended.seconds < _LONG
        ]
        assert len(known) == len(set(known))


def test_a_job_is_preempted_if_all_workers_have_saved():
    for failure, codes, saved in [
        (stopped_by(0, signal.SIGTERM), [75, 75], True),
        (stopped_by(1, signal.SIGHUP), [75, 0], True),
        (stopped_by(0, signal.SIGTERM), [75, -9], False),
        (stopped_by(0, signal.SIGTERM), [0, 0], False),
        (stopped_by(0, signal.SIGTERM), [-15], False),
        (stopped_by(0, signal.SIGINT), [75, 75], False),
        (failed(status=75), [75, 75], True),
        (failed(status=75), [75, -15], False),
        (failed(status=1), [75, 1], False),
    ]:
        assert all_saved(failure, codes) == saved, (failure, codes)


@pytest.mark.parametrize(
    "message",
    some(
        messages := [
            HostEnd((75, -9), "worker 1 (pid 7)", True),
            RestartDecision(failed(7, *OS_ERROR), 1, 3, 2.0, "why", True),
            RestartDecision(stopped_by(1, signal.SIGTERM)),
            Begin(3, "hush"),
        ],
        always=messages[1:2],
    ),
)
def test_what_the_hosts_tell_each_other(message):
    sent = json.loads(json.dumps(dataclasses.asdict(message)))
    assert decode(type(message), sent) == message
    for name in sent:
        with pytest.raises(ValueError):
            decode(type(message), {key: sent[key] for key in sent if key != name})
        for other in (float("inf"), 1e300, 1 << 64, {}, [[]]):
            with pytest.raises(ValueError):
                decode(type(message), {**sent, name: other})
    assert "hush" not in repr(message)


def test_a_failure_tells_its_step_and_its_cause():
    failure = failed(7, *OS_ERROR, message="no such file")
    assert str(failure) == "worker 1 failed with exit code 1, after step 7."
    assert failure.cause == "FileNotFoundError: no such file"
    assert decode(Failure, json.loads(json.dumps(dataclasses.asdict(failure)))) == failure
