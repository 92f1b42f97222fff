"""What requires real processes: signals, deaths and exits."""

import signal
import sys
import textwrap

import pytest

from tests.harness.tiers import exhaustive, rotating, some

REPORT = """
session.on_peer_lost(lambda message: tell("LOST", message))
"""
WAIT = """
tell("waiting")
if rank == ABSENT:
    stay()
try:
    session.exchange("forever", b"")
except Exception as error:
    tell("RAISED", type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("number", "where"), rotating([signal.SIGTERM, signal.SIGINT], [(0, 1), (1, 0), (1, 2)])
)
def test_signals_are_handled_while_waiting_for_the_others(addresses, spawn, where, number):
    rank, other = where
    cluster = addresses(3)
    process = spawn(cluster, rank, "", SAY_EVERY="0")
    spawn(cluster, other, "")
    process.until("cannot be reached" if other == 2 else "waiting for 1 of 3 workers")
    process.send_signal(number)
    output = process.rest()
    assert process.returncode == -number
    assert number == signal.SIGTERM or "KeyboardInterrupt" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_handled_in_an_exchange(job, number):
    body = "if rank == 1: stay()\ntell('waiting')\nsession.exchange('a', b'')"
    process = job(2, body)[0]
    process.until("waiting")
    process.send_signal(number)
    process.rest()  # long before the exchange's deadline


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_is_noticed_by_all(job, victim):
    group = job(4, f"ABSENT = {victim}{WAIT}")
    for process in group:
        process.until("waiting")
    group[victim].kill()
    lines = [group[rank].until("RAISED") for rank in range(4) if rank != victim]
    for line in lines:
        assert f"RAISED PeerLostError rank {victim}, worker {victim} (" in line
        assert "connection closed" in line or "connection broken" in line


@pytest.mark.parametrize("victim", [0, 1])
def test_the_callback_runs_while_the_program_is_busy(job, victim):
    group = job(3, REPORT + "tell('waiting')\nstay()")
    for process in group:
        process.until("waiting")
    group[victim].kill()
    for rank in range(3):
        if rank != victim:
            assert f"rank {victim}, worker {victim} (" in group[rank].until("LOST")


@pytest.mark.parametrize(
    "last",
    some(["", "sys.exit()", "sys.exit(3)", "session.close()"], always=["", "sys.exit(3)"]),
)
def test_a_normal_exit_is_no_loss(job, last):
    body = f"""{REPORT}
left = threading.Event()
session.on_peer_left(lambda message: left.set())
if rank != 1: left.wait()
{last}
"""
    for process in job(3, body):
        assert "LOST" not in process.rest()
        assert process.returncode == (3 if "3" in last else 0)


@pytest.mark.parametrize("victim", [0, 1])
def test_an_uncaught_exception_is_reported(job, victim):
    body = f"{REPORT}\nif rank == {victim}: raise ValueError('bad\\nshape')\nstay()"
    group = job(3, body)
    for rank in range(3):
        if rank != victim:
            line = group[rank].until("LOST")
            assert f"rank {victim}, worker {victim} (" in line
            assert ") failed: ValueError: bad; see its log" in line
    assert "Traceback" in group[victim].rest()


def test_the_first_cause_is_reported(job):
    body = """
    if rank == 1:
        raise ValueError("the cause")
    session.exchange("a", b"")
    """
    for rank, process in enumerate(job(4, body)):
        output = process.rest()
        assert "ValueError: the cause" in output
        assert rank == 1 or "PeerLostError: rank 1, worker 1 (" in output


def test_a_mismatch_is_reported_on_every_rank(job):
    body = "session.exchange('a' if rank < 2 else 'b', b'')"
    for process in job(3, body):
        output = process.rest()
        assert "ProgramMismatchError" in output
        assert "'b' at worker 2" in output


@exhaustive
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_suspended_worker_is_lost_and_learns_of_it(job):
    body = f"ABSENT = 1{WAIT}stay()"
    group = job(3, REPORT + body, TFDIST_HEARTBEAT_TIMEOUT="5")
    for process in group:
        process.until("waiting")
    group[1].send_signal(signal.SIGSTOP)
    for rank in (0, 2):
        line = group[rank].until("RAISED")
        assert "rank 1, worker 1 (" in line
        assert "no sign of life for 5 s" in line
    group[1].send_signal(signal.SIGCONT)
    assert "no sign of life for 5 s" in group[1].until("LOST")


def test_a_forked_child_neither_sends_nor_keeps_connections_open(job):
    body = """
    if rank == 1:
        lock = session._role._connections._by_rank[0].lock
        lock.acquire()  # as if another thread were sending
        if os.fork():
            lock.release()
        else:
            session.close()
            tell("child has closed")
            os.close(1), os.close(2)  # the test reads to the end of them
            stay()
    session.exchange("a", b"")
    tell("exchanged")
    stay()
    """
    group = job(2, REPORT + textwrap.dedent(body))
    group[1].until("child has closed")
    group[0].until("exchanged")
    group[1].kill()
    assert "connection" in group[0].until("LOST")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_second_rank_0_names_the_first(addresses, spawn):
    cluster = addresses(2)
    first = spawn(cluster, 0, "", SAY_EVERY="0")
    first.until("waiting for")
    output = spawn(cluster, 0, "").rest()
    assert f"worker 0 ({cluster[0]}): port" in output
    assert f"in use by process {first.pid} (" in output
