"""Elastic jobs on several hosts: a host that is lost ends nothing, and may come again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from dataclasses import asdict

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive
from tfdist._src.cluster.auth.handshake import MAGIC, handshake
from tfdist._src.cluster.auth.identity import LAUNCH, Identity
from tfdist._src.launch.hosts.newcomers import Channel, HostInfo

from .conftest import until
from .test_elastic import BEGIN, LIGHT, life, lives
from .test_hosts import INFINITE, at  # noqa: F401


@pytest.fixture
def program(script):
    return lambda body: script(BEGIN.replace('"new"', 'f"new-{rank}"') + body)


@pytest.fixture
def start(launch, at):  # noqa: F811
    """Starts one host of several, with one worker by default."""

    def host(number, path, *, nnodes=2, workers=1, elastic=True, **settings):
        options = ["--elastic", "--spares", "0"] if elastic else []
        own = ["-n", str(workers), "--nnodes", str(nnodes), "--node-rank", str(number)]
        return launch(*options, *own, "--rendezvous", at, path, seconds=LIGHT, **settings)

    return host


def addresses(folder, rank, number):
    return json.loads(life(folder, rank, number)["TF_CONFIG"])["cluster"]["worker"]


def until_lives(folder, *names):
    until(lambda: set(names) <= set(lives(folder)))


@exhaustive
def test_each_host_replaces_its_own_workers(start, program, tmp_path):
    path = program("""
meet()
if rank == 1 and life == 0: step(3); die()
if rank == 1: step(4); tell("joined")
hear("joined")
""")
    jobs = [start(host, path, nnodes=3) for host in range(3)]
    assert [job.wait() for job in jobs] == [0, 0, 0], [job.err for job in jobs]
    assert lives(tmp_path) == ["0-0", "1-0", "1-1", "2-0"]
    assert life(tmp_path, 1, 0)["TF_CONFIG"] == life(tmp_path, 1, 1)["TF_CONFIG"]
    assert "after step 3; replaced at once (1 of 3). The others continue." in jobs[1].err
    # Host 0 tells of all in the end.
    for job in jobs[:2]:
        assert "The training is complete. Failures:" in job.err
    assert jobs[2].err == ""


@exhaustive
def test_a_lost_host_comes_again(start, program, tmp_path):
    path = program("""
meet()
if rank == 1 and life: step(5); tell("joined")
hear("joined")
""")
    jobs = [start(0, path, nnodes=3), start(1, path, nnodes=3), start(2, path, nnodes=3)]
    until_lives(tmp_path, "0-0", "1-0", "2-0")
    jobs[1].process.kill()
    jobs[1].wait()
    jobs[0].wait_err("The others continue without it.")
    jobs[1].wait_gone()
    again = start(1, path, nnodes=3)
    assert [job.wait() for job in (jobs[0], again, jobs[2])] == [0, 0, 0]
    assert "host 1 (127.0.0.1) was lost: its launcher died or the network" in jobs[0].err
    assert "host 1 (127.0.0.1) has reconnected; its workers join." in jobs[0].err
    assert "tfdist run: The training is complete. Failures:" in jobs[0].err
    assert "the network connection broke; it reconnected later" in jobs[0].err
    assert lives(tmp_path) == ["0-0", "1-0", "1-1", "2-0"]
    old, new = addresses(tmp_path, 1, 0), addresses(tmp_path, 1, 1)
    assert [one == other for one, other in zip(old, new, strict=True)] == [True, False, True]
    assert life(tmp_path, 1, 0)["TFDIST_SECRET"] == life(tmp_path, 1, 1)["TFDIST_SECRET"]
    assert all(job.processes() == set() for job in (*jobs, again))


@exhaustive
def test_replacements_elsewhere_know_the_new_addresses(start, program, tmp_path):
    path = program("""
meet()
if rank == 1 and life: hear("life-2-1.json"); step(5); tell("joined")
if rank == 2 and life == 0: hear("die"); die()
hear("joined")
""")
    jobs = [start(0, path, nnodes=3), start(1, path, nnodes=3), start(2, path, nnodes=3)]
    until_lives(tmp_path, "0-0", "1-0", "2-0")
    jobs[1].process.kill()
    jobs[0].wait_err("The others continue without it.")
    again = start(1, path, nnodes=3)
    jobs[0].wait_err("has reconnected")
    until_lives(tmp_path, "1-1")
    (tmp_path / "die").touch()
    assert [job.wait() for job in (jobs[0], again, jobs[2])] == [0, 0, 0]
    assert addresses(tmp_path, 2, 1) == addresses(tmp_path, 1, 1) != addresses(tmp_path, 2, 0)


@exhaustive
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "host 0 (127.0.0.1) was lost: its launcher died or the network"),
        (signal.SIGTERM, "host 0 (127.0.0.1) was asked to stop."),
    ],
)
def test_the_others_go_on_without_host_0(start, program, tmp_path, number, said):
    path = program("""
save_on_sigterm()
meet()
if rank == 0: stay()
if rank == 1 and life == 0: hear("die"); step(3); die()
if rank == 1: step(4); tell("joined")
hear("joined")
""")
    jobs = [start(host, path, nnodes=3) for host in range(3)]
    until_lives(tmp_path, "0-0", "1-0", "2-0")
    jobs[0].process.send_signal(number)
    assert jobs[0].wait() == (75 if number == signal.SIGTERM else -9)
    for job in jobs[1:]:
        job.wait_err(f"{said}")
        assert "This host continues without it, and cannot admit hosts" in job.err
    (tmp_path / "die").touch()
    assert [job.wait() for job in jobs[1:]] == [0, 0]
    assert "1-1" in lives(tmp_path)


@exhaustive
def test_a_host_that_is_told_to_stop_leaves(start, program, tmp_path):
    path = program("save_on_sigterm(); meet()\nif rank == 1: stay()\nhear('on')")
    jobs = [start(host, path) for host in range(2)]
    until_lives(tmp_path, "0-0", "1-0")
    jobs[1].process.send_signal(signal.SIGTERM)
    assert jobs[1].wait() == 75
    jobs[0].wait_err("host 1 was asked to stop; the others continue without it.")
    assert "was lost" not in jobs[0].err
    (tmp_path / "on").touch()
    assert jobs[0].wait() == 0


@exhaustive
@pytest.mark.parametrize("host", [0, 1])
def test_ctrl_c_on_one_host_stops_all(start, program, tmp_path, host):
    path = program("meet(); stay()")
    jobs = [start(number, path) for number in range(2)]
    until_lives(tmp_path, "0-0", "1-0")
    jobs[host].process.send_signal(signal.SIGINT)
    assert [job.wait() for job in jobs] == [130, 130]
    assert all("was stopped by SIGINT." in job.err for job in jobs)
    assert all(job.processes() == set() for job in jobs)


@exhaustive
def test_the_exit_code_is_that_of_the_job_on_all_hosts(start, program, tmp_path):
    path = program("meet()\nif rank == 0: sys.exit(6)\nhear('go'); sys.exit(7)")
    jobs = [start(host, path) for host in range(2)]
    until_lives(tmp_path, "0-0", "1-0")
    jobs[0].wait_err("worker 0 failed with exit code 6")
    # Each is replaced once, and then the same failure has come twice.
    jobs[0].wait_err("; not replaced: it has failed in the same way before its first step")
    (tmp_path / "go").touch()
    assert [job.wait() for job in jobs] == [6, 6]


@exhaustive
def test_a_replacement_is_stopped_once_all_hosts_are_done(start, program, tmp_path):
    path = program("""
if rank == 1 and life == 0: meet(); die()
if rank == 1: tell("waits"); stay()
hear("waits")
if rank == 2: hear("late")
""")
    jobs = [start(host, path, nnodes=3) for host in range(3)]
    until_lives(tmp_path, "0-0", "1-1", "2-0")
    pids = [life(tmp_path, rank, number)["pid"] for rank, number in ((0, 0), (1, 1))]
    until(lambda: not os.path.exists(f"/proc/{pids[0]}"))
    assert os.path.exists(f"/proc/{pids[1]}")
    (tmp_path / "late").touch()
    assert [job.wait() for job in jobs] == [0, 0, 0], [job.err for job in jobs]


@exhaustive
@pytest.mark.parametrize(
    ("host", "options", "problem"),
    [
        (1, {"workers": 2}, "reconnects with 2 workers, but had 1: pass the same -n"),
        (1, {}, "two hosts were started with --node-rank 1"),
        (
            1,
            {"elastic": False},
            "host 0 was started with --elastic, host 1 (127.0.0.1) without",
        ),
    ],
)
def test_who_does_not_fit_is_refused_and_the_job_goes_on(
    start, program, tmp_path, host, options, problem
):
    path = program("meet(); hear('on')")
    jobs = [start(number, path) for number in range(2)]
    until_lives(tmp_path, "0-0", "1-0")
    if options:
        jobs[1].process.kill()
        jobs[0].wait_err("was lost")
    stranger = start(host, path, **options)
    assert stranger.wait() == 1
    assert problem in stranger.err
    assert ": not admitted: " in jobs[0].err and problem in jobs[0].err
    (tmp_path / "on").touch()
    assert jobs[0].wait() == 0, jobs[0].err
    if not options:
        assert jobs[1].wait() == 0


@pytest.fixture
def stranger():
    """A launcher at another address that claims to be host 1, authenticated; gives its channel."""
    made = []

    def claim(at, secret=""):  # noqa: F811
        place = ("127.0.0.1", int(at.rpartition(":")[2]))
        sock = socket.create_connection(place, FAR, source_address=("127.0.0.2", 0))
        made.append(sock)
        mine = Identity.of_other("host 1", LAUNCH, 1)
        handshake(sock, mine, secret, time.monotonic() + FAR, first=True)
        channel = Channel(sock)
        channel.send("host", asdict(HostInfo(1, 2, "127.0.0.1", (4000,), elastic=True)))
        return channel

    yield claim
    for sock in made:
        sock.close()


def answer(channel):
    while not (messages := channel.receive()):
        select.select([channel], [], [])
    return messages[0]


@exhaustive
@pytest.mark.parametrize("secret", ["", "hush"])
def test_a_lost_host_comes_again_from_elsewhere_only_with_a_secret(
    start,
    program,
    tmp_path,
    stranger,
    at,  # noqa: F811
    secret,
):
    settings = {"TFDIST_SECRET": secret} if secret else {}
    jobs = [start(number, program("meet(); hear('on')"), **settings) for number in range(2)]
    until_lives(tmp_path, "0-0", "1-0")
    jobs[1].process.kill()
    jobs[0].wait_err("was lost")
    channel = stranger(at, secret)
    kind, value = answer(channel)
    if secret:
        assert kind == "start" and value["secret"] == ""
    else:
        assert kind == "refuse" and "host 1 (127.0.0.2) was at 127.0.0.1 before" in value
    channel.close()
    (tmp_path / "on").touch()
    assert jobs[0].wait() == 0


@exhaustive
def test_strangers_do_not_end_a_job(start, program, tmp_path, at):  # noqa: F811
    settings = {"TFDIST_SECRET": "hush"}
    jobs = [start(number, program("meet(); hear('on')"), **settings) for number in range(2)]
    until_lives(tmp_path, "0-0", "1-0")
    place = ("127.0.0.1", int(at.rpartition(":")[2]))
    with socket.create_connection(place, FAR) as one:
        one.sendall(f"{INFINITE}\n".encode())
        with contextlib.suppress(OSError):
            assert one.recv(1) == b""
    many = [socket.create_connection(place, FAR) for _ in range(300)]
    for one in many:
        with contextlib.suppress(OSError):  # the oldest have been dropped
            one.sendall(MAGIC[:1])
    assert jobs[0].process.poll() is None
    jobs[1].process.kill()
    jobs[0].wait_err("was lost")
    again = start(1, program("meet(); hear('on')"), **settings)
    jobs[0].wait_err("has reconnected")
    (tmp_path / "on").touch()
    assert [jobs[0].wait(), again.wait()] == [0, 0]
    assert jobs[0].err.count("dropped") <= 3
    for one in many:
        one.close()


@exhaustive
def test_one_elastic_host_and_one_that_is_not(start, program):
    jobs = [start(0, program("")), start(1, program(""), elastic=False)]
    assert [job.wait() for job in jobs] == [1, 1]
    assert all("pass it on all hosts, or on none" in job.err for job in jobs)


@exhaustive
def test_the_last_worker_of_the_last_host_is_not_replaced(start, program, tmp_path):
    path = program("meet()\nif rank == 0: stay()\nhear('die'); step(3); sys.exit(4)")
    jobs = [start(host, path) for host in range(2)]
    until_lives(tmp_path, "0-0", "1-0")
    jobs[0].process.kill()
    jobs[1].wait_err("This host continues without it")
    (tmp_path / "die").touch()
    assert jobs[1].wait() == 4
    assert (
        "not replaced: host 0 is lost, and no other worker remains that it could join"
        in jobs[1].err
    )
    assert lives(tmp_path) == ["0-0", "1-0"]
