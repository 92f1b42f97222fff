"""Which failure is the first one, and how it reads: tables."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import asdict

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.launch.job.failure import (
    Doubt,
    Failure,
    FirstFailure,
    decode,
    describe,
    lost_host,
    stopped_by,
    worker_failure,
)

TRACE = ("Traceback (most recent call last):", "ValueError: bad")
VICTIM = ("Traceback (most recent call last):", "tfdist.errors.PeerLostError: worker 2 was lost")
CHAINED = "During handling of the above exception, another exception occurred:"


def failed(rank, *, status=1, tail=TRACE, log="log", host=0):
    return worker_failure(host=host, rank=rank, status=status, tail=tail, log=log)


FAILURES = [
    (failed(1), 1, Doubt.NONE, "failed with exit code 1"),
    (failed(1, status=77), 77, Doubt.NONE, "failed with exit code 77"),
    (failed(1, tail=VICTIM), 1, Doubt.VICTIM, "failed with exit code 1"),
    (failed(1, tail=("UnavailableError: peer",)), 1, Doubt.VICTIM, "failed"),
    (failed(1, tail=(*VICTIM, *TRACE)), 1, Doubt.NONE, "failed"),
    (failed(1, tail=("saw UnavailableError", *TRACE, "bye")), 1, Doubt.NONE, "failed"),
    (failed(1, tail=(*VICTIM, "", CHAINED, "", *TRACE)), 1, Doubt.VICTIM, "failed"),
    (failed(0, tail=(), log=""), 1, Doubt.UNSEEN, "failed"),
    (failed(0, status=-6, tail=(), log=""), 134, Doubt.NONE, "was killed by SIGABRT"),
    (failed(1, status=-9, tail=VICTIM), 137, Doubt.NONE, "SIGKILL.* memory"),
    (failed(1, status=-64), 192, Doubt.NONE, "killed by SIGRTMAX"),
    (failed(1, status=-63), 191, Doubt.NONE, "killed by signal 63"),
    (stopped_by(0, signal.SIGINT), 130, Doubt.NONE, "was stopped by SIGINT"),
    (stopped_by(2, signal.SIGTERM), 143, Doubt.NONE, "was stopped by SIGTERM"),
    (lost_host(1, "10.0.0.2"), 1, Doubt.NONE, "was lost"),
]


def test_failures_are_described_and_survive_encoding():
    for failure, code, doubt, event in FAILURES:
        assert (failure.code, failure.doubt) == (code, doubt), failure
        assert re.search(event, failure.event)
        assert decode(Failure, json.loads(json.dumps(asdict(failure)))) == failure


@pytest.mark.parametrize(
    "change",
    [
        {"code": "x"},
        {"code": 0},
        {"code": 512},
        {"code": True},
        {"code": 1.0},
        {"code": float("inf")},
        {"host": 1 << 100},
        {"doubt": 9},
        {"doubt": "0"},
        {"tail": 3},
        {"tail": "lines"},
        {"tail": [3]},
        {"time": 1e300},
        {"time": -1.0},
        {"time": float("nan")},
        {"stopped": 1},
        {"more": 1},
    ],
)
def test_what_is_no_failure_is_not_decoded(change):
    with pytest.raises(ValueError):
        decode(Failure, {**asdict(failed(1)), "tail": [], "classes": [], **change})


CLEAR, UNSEEN, LOST = failed(3), failed(0, tail=(), log=""), failed(1, tail=VICTIM)


ORDERS = [
    ([], 100.0, None),
    ([(0.0, CLEAR)], 0.0, CLEAR),
    ([(0.0, CLEAR), (0.0, failed(2))], 0.0, CLEAR),
    ([(0.0, LOST)], 0.9, None),
    ([(0.0, LOST)], 1.0, LOST),
    ([(0.0, LOST), (0.5, CLEAR)], 0.5, CLEAR),
    ([(0.0, UNSEEN), (0.5, CLEAR)], 0.5, CLEAR),
    ([(0.0, UNSEEN), (0.5, LOST)], 0.9, None),
    ([(0.0, UNSEEN), (0.5, LOST)], 1.0, UNSEEN),
    ([(0.0, LOST), (0.5, UNSEEN)], 1.0, UNSEEN),
    ([(0.0, LOST), (0.5, failed(2, tail=VICTIM))], 1.0, LOST),
]


def test_the_first_failure():
    for failures, asked, decided in ORDERS:
        first = FirstFailure(delay=1.0)
        for time, failure in failures:
            first.add(failure, time)
        assert first.decided(asked) is decided, failures


def test_another_host_waits_for_the_decision_of_host_0():
    first = FirstFailure(delay=3.0, decides=False)
    first.add(CLEAR, 0.0)
    assert first.decided(2.9) is None
    assert first.decided(3.0) is CLEAR


@exhaustive
def test_one_that_has_saved_waits_longer_for_the_others():
    saved = failed(3, status=75)
    assert saved.doubt == Doubt.PREEMPTED
    for failures, asked, decided in [
        ([(0.0, saved)], 25.9, None),
        ([(0.0, saved), (9.0, failed(2, status=75))], 26.0, saved),
        ([(0.0, saved), (5.0, LOST)], 5.9, None),
        ([(0.0, saved), (5.0, LOST)], 6.0, LOST),
        ([(0.0, LOST), (0.5, saved)], 1.0, LOST),
        ([(0.0, saved), (5.0, CLEAR)], 5.0, CLEAR),
    ]:
        first = FirstFailure(delay=1.0, patience=25.0)
        for time, failure in failures:
            first.add(failure, time)
        assert first.decided(asked) is decided, failures


READS = [
    (
        failed(1, log="/logs/worker-1.log"),
        0,
        [
            "worker 1 failed with exit code 1. Last lines of its output:",
            "  | Traceback (most recent call last):",
            "  | ValueError: bad",
            "  Full output: /logs/worker-1.log",
        ],
    ),
    (
        failed(1, log="/logs/worker-1.log", tail=()),
        0,
        ["worker 1 failed with exit code 1. Its log is empty: /logs/worker-1.log."],
    ),
    (
        failed(5, log="/logs/worker-5.log", host=1),
        0,
        [
            "worker 5 failed with exit code 1. Last lines of its output:",
            "  | Traceback (most recent call last):",
            "  | ValueError: bad",
            "  Full output on host 1: /logs/worker-5.log",
            "  Worker logs on this host: /here",
        ],
    ),
    (
        UNSEEN,
        0,
        [
            "worker 0 failed with exit code 1. Its output is above.",
            "  Worker logs on this host: /here",
        ],
    ),
    (
        UNSEEN,
        1,
        [
            "worker 0 failed with exit code 1. Its output is in the terminal of host 0.",
            "  Worker logs on this host: /here",
        ],
    ),
    (
        stopped_by(0, signal.SIGINT),
        0,
        ["this command was stopped by SIGINT.", "  Worker logs on this host: /here"],
    ),
]


def test_what_the_user_reads():
    for failure, host, lines in READS:
        assert describe(failure, host, "/here").splitlines() == lines
