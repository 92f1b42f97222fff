"""Deaths that a process of the same machine sees, and the records of the dead."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.cluster.cluster_spec import Worker
from tfdist._src.cluster.membership import record
from tfdist._src.cluster.membership import record as places
from tfdist._src.cluster.membership.consensus import AcceptorState, Ballot, Vote
from tfdist._src.cluster.membership.liveness import LivenessResult, look
from tfdist._src.cluster.membership.record import here, is_dead, is_visible
from tfdist._src.cluster.membership.view import Member, ProcessIdentity, View
from tfdist._src.cluster.membership.wire import encode_acceptor
from tfdist._src.options import Options

DAY = 24 * 3600.0


def token(number):
    return f"{number:016x}"


def view(*members, generation=1):
    return View(
        generation,
        tuple(
            Member(Worker("worker", n, f"w:{n + 1}"), token(n), where)
            for n, where in enumerate(members)
        ),
    )


SOMEWHERE = ProcessIdentity("m", 1, 1)
VOTE = Vote(Ballot(3, 1), view(SOMEWHERE, generation=2))
ACCEPTOR_STATES = [
    AcceptorState(),
    AcceptorState(view(SOMEWHERE)),
    AcceptorState(view(SOMEWHERE), Ballot(4, 0), VOTE, view(SOMEWHERE)),
]


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The folder in which the folder of the records is."""
    monkeypatch.setattr(record, "_MEMORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def dead():
    """The place of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return replace(here(Options()), pid=ended.pid)


def age(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def end_process(one):
    """What the end of its process does to a record."""
    one._file.close()
    one._folder.close()
    return one.path


def test_deaths_are_proven(child):
    mine = here(Options())
    with open(f"/proc/{child.pid}/stat") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    place = ProcessIdentity(mine.machine, child.pid, started)
    assert is_visible(place, mine)
    assert not is_dead(place)
    child.send_signal(signal.SIGSTOP)
    assert not is_dead(place)
    assert is_dead(
        ProcessIdentity(mine.machine, child.pid, started + 1)
    )  # its id belongs to another now
    child.kill()
    assert is_dead(place, 60.0)
    child.wait()
    assert is_dead(place)
    assert not is_dead(mine)
    assert not is_visible(here(Options(host="other")), mine)
    assert look(mine, mine) == LivenessResult(alive=True)
    assert look(mine, replace(mine, machine="other")) == LivenessResult()


def test_the_id_of_a_dead_process_may_be_that_of_a_thread():
    mine = here(Options())
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert is_dead(replace(mine, pid=thread.native_id, started=mine.started - 1))
    finally:
        ended.set()
        thread.join()


def test_machines_that_cannot_be_told_apart_see_nothing(monkeypatch):
    monkeypatch.setattr(places, "_BOOT", "/nowhere")
    mine = here(Options())
    assert not is_visible(here(Options()), mine)


@exhaustive
def test_a_record_is_the_last_word(memory):
    one = record.Record(token(1))
    for acceptor in ACCEPTOR_STATES:
        one.write(acceptor)
        assert record.read(one.path) == acceptor
    other = record.Record(token(2))
    other.remove()
    assert record.read(one.path) == ACCEPTOR_STATES[-1]
    with open(one.path, "w") as file:
        file.write("{")
    assert record.read(one.path) is None
    for elsewhere in (memory / token(3), record.folder() / "elsewhere"):
        elsewhere.write_text(json.dumps(encode_acceptor(AcceptorState())))
        assert record.read(str(elsewhere)) is None
        record.remove(str(elsewhere))
        assert elsewhere.exists()
        elsewhere.unlink()
    record.remove(one.path)
    assert not record.folder().exists()


@exhaustive
def test_records_that_nobody_needs_any_more_are_removed(memory, dead):
    mine = here(Options())
    elsewhere = here(Options(host="other"))
    of_the_dead, of_a_living, of_another_host, recent, unknown = map(token, range(5))
    for name, group in {
        of_the_dead: view(dead),
        of_a_living: view(dead, mine),
        of_another_host: view(dead, elsewhere),
        recent: view(dead),
        unknown: None,
    }.items():
        one = record.Record(name)
        one.write(AcceptorState(group))
        end_process(one)
        if name != recent:
            age(one.path, DAY / 12)
    left = record.folder() / f"{token(5)}.new"
    left.write_text("{")
    age(left, DAY / 12)
    record.sweep(mine)
    assert set(os.listdir(record.folder())) == {of_a_living, of_another_host, recent, unknown}
    # Known to be dead for so long, whoever lives.
    for name in os.listdir(record.folder()):
        age(record.folder() / name, 8 * DAY)
    record.sweep(mine)
    assert set(os.listdir(record.folder())) == set()


def test_the_record_of_a_living_process_is_kept_however_old(memory, dead):
    """That of a job whose group has not changed is old."""
    mine = here(Options())
    one = record.Record(token(1))
    for acceptor in (AcceptorState(), AcceptorState(view(dead))):
        one.write(acceptor)
        age(one.path, 100 * DAY)
        record.sweep(mine)
        assert record.read(one.path) == acceptor


def test_a_process_that_has_just_died_is_remembered_however_old_its_record(memory, dead):
    """Its replacement sweeps before the others have read its last word."""
    mine = here(Options())
    one = record.Record(token(1))
    one.write(AcceptorState(view(dead, here(Options(host="other")))))
    age(one.path, 8 * DAY)
    path = end_process(one)
    for _ in range(2):
        record.sweep(mine)
        assert record.read(path) == AcceptorState(view(dead, here(Options(host="other"))))
    age(path, 8 * DAY)
    record.sweep(mine)
    assert not os.path.exists(path)


def test_a_child_does_not_keep_a_record_alive(memory):
    one = record.Record(token(1))
    mine, its = socket.socketpair()
    child = os.fork()
    if not child:
        mine.close()
        its.send(b"!")
        its.recv(1)
        os._exit(0)
    with mine, its:
        mine.recv(1)
        path = end_process(one)
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine.close()
        os.waitpid(child, 0)


def old_file(folder, name):
    path = folder / name
    path.write_text("{")
    age(path, 100 * DAY)
    return path


def test_another_user_cannot_have_other_files_removed(memory, monkeypatch):
    mine = here(Options())
    home = memory / "home"
    home.mkdir(mode=0o700)
    thesis = [old_file(home, "thesis.tex"), old_file(home, token(1))]
    record.folder().symlink_to(home)  # as anybody can in /dev/shm
    record.sweep(mine)
    one = record.Record(token(2))
    assert one.path == ""
    record.remove(str(record.folder() / token(1)))
    assert record.read(str(record.folder() / token(1))) is None
    assert sorted(home.iterdir()) == sorted(thesis)
    record.folder().unlink()
    for mode in (0o770, 0o707):
        record.folder().mkdir()
        record.folder().chmod(mode)
        kept = old_file(record.folder(), token(1))
        record.sweep(mine)
        assert record.Record(token(2)).path == ""
        assert list(record.folder().iterdir()) == [kept]
        kept.unlink()
        record.folder().rmdir()
    # Only what has the name of a record is removed, and no links are followed.
    record.folder().mkdir(mode=0o700)
    kept = old_file(record.folder(), "thesis.tex")
    link = record.folder() / token(1)
    link.symlink_to(thesis[0])
    record.sweep(mine)
    assert record.read(str(link)) is None
    assert {kept, link} == set(record.folder().iterdir())
    assert kept.stat().st_mode & 0o200  # nor touched
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    record.folder().mkdir(mode=0o700)
    assert record.Record(token(2)).path == ""  # the folder belongs to another user


def test_the_folder_may_be_removed_while_a_record_is_made(memory, monkeypatch):
    real = record._open_folder
    tries = []

    def disturbed():
        opened = real()
        if not tries:
            record.folder().rmdir()
        tries.append(opened)
        return opened

    monkeypatch.setattr(record, "_open_folder", disturbed)
    one = record.Record(token(1))
    assert len(tries) == 2
    one.write(ACCEPTOR_STATES[1])
    assert record.read(one.path) == ACCEPTOR_STATES[1]


@exhaustive
def test_a_record_that_cannot_be_replaced_is_no_last_word(memory, monkeypatch, capsys):
    one = record.Record(token(1))
    path = one.path

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    one.write(ACCEPTOR_STATES[1])
    assert record.read(path) is None
    assert os.listdir(record.folder()) == []
    assert "can no longer record its agreements" in capsys.readouterr().err
    one.write(ACCEPTOR_STATES[2])
    one.remove()


@exhaustive
def test_without_a_folder_there_is_no_record(memory):
    record.folder().write_text("")
    one = record.Record(token(1))
    assert one.path == ""
    one.write(AcceptorState())
    assert record.read(one.path) is None
    assert os.listdir(memory) == [record.folder().name]
