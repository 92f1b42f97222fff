"""What SIGTERM does while `fit` runs, in children that are forked then, and after a worker left."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tfdist._src.keras.fit.step_exchange import Request, step_exchange
from tfdist._src.options import PREEMPTED
from tfdist._src.recovery.preemption import Preemption, can_go_on, preemption
from tfdist._src.snapshots.shard_state import HeldShards


@pytest.fixture
def outside():
    """The signals that the handler from outside of `fit` has seen."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def terminate():
    signal.raise_signal(signal.SIGTERM)


def status_of_child(act):
    """The status of a forked process that does something, and then exits with 7."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(7)
    return os.waitpid(pid, 0)[1]


def test_it_is_a_request_in_each_step_until_training_ends(outside):
    with preemption.heeding():
        assert not step_exchange.wanted
        terminate()
        terminate()
        for _ in range(2):
            step_exchange.publish()
            assert step_exchange.wanted == Request.SAVE_AND_EXIT
        assert not outside
    # No step has heard of it.
    assert outside == [signal.SIGTERM]
    assert not step_exchange.wanted


@pytest.mark.parametrize("thread", [False, True])
def test_it_ends_processes_that_are_forked_meanwhile(thread):
    statuses = []

    def fork():
        statuses.append(status_of_child(terminate))

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with preemption.heeding():
            if thread:
                forking = threading.Thread(target=fork)
                forking.start()
                forking.join()
            else:
                fork()
            assert not preemption.asked
    finally:
        signal.signal(signal.SIGTERM, before)
    assert os.WIFSIGNALED(statuses[0]) and os.WTERMSIG(statuses[0]) == signal.SIGTERM


def test_a_child_that_gets_it_at_once_is_not_told_yet(outside):
    early = Preemption()  # whose children are not told
    with early.heeding():
        status = status_of_child(lambda: terminate() or os._exit(len(outside)))
    assert os.waitstatus_to_exitcode(status) == 1
    assert not outside


def test_children_of_a_worker_that_has_left_are_ended_by_it():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit), preemption.heeding():
            raise SystemExit(PREEMPTED)
        status = status_of_child(terminate)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert os.WIFSIGNALED(status)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("code", [PREEMPTED, 1])
def test_a_worker_that_leaves_keeps_its_exit_code(outside, asked, code):
    with pytest.raises(SystemExit), preemption.heeding():
        if asked:
            terminate()
        raise SystemExit(code)
    assert not outside
    terminate()
    assert len(outside) == (code != PREEMPTED)


def test_an_error_does_not_swallow_it(outside):
    with pytest.raises(ValueError), preemption.heeding():
        terminate()
        raise ValueError
    assert len(outside) == 1
    terminate()
    assert len(outside) == 2


def test_callbacks_share_the_handler(outside):
    with preemption.heeding(), preemption.heeding():
        terminate()
        assert preemption.asked
    assert len(outside) == 1


def test_it_ends_a_wait_for_workers(outside, capsys):
    with preemption.heeding():
        preemption.check(saved=True)
        terminate()
        with pytest.raises(SystemExit) as raised:
            preemption.check(saved=True)
        assert raised.value.code == PREEMPTED
        assert not outside
        preemption.check(saved=False)
        assert len(outside) == 1
        preemption.check(saved=False)
        terminate()
        assert preemption.asked and len(outside) == 1
    assert len(outside) == 2


def test_who_goes_on_without_those_that_leave():
    def whole(size, leaving, least=1):
        return can_go_on(leaving, [None] * size, None, least, 7)

    assert whole(3, {0}) and whole(3, {0, 1}) and not whole(3, {0, 1, 2}) and not whole(1, {0})
    assert whole(3, {1}, 2) and not whole(3, {0, 1}, 2)
    shards = [(HeldShards(0, 3, (rank,), 7),) for rank in range(3)]
    assert not can_go_on({1}, shards, None, 1, 7)
    copies = [(HeldShards(0, 3, (rank, (rank - 1) % 3), 7),) for rank in range(3)]
    assert can_go_on({1}, copies, None, 1, 7)
    assert not can_go_on({1, 2}, copies, None, 1, 7)
