"""Several launchers as several hosts: they find one another, and end together."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import time

import pytest

from tests.certificates import variables
from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive, some
from tfdist._src.cluster.auth.handshake import MAGIC
from tfdist._src.cluster.net.framing import HELLO_LIMIT, encode, read_exactly, read_frame
from tfdist._src.cluster.net.listener import port_holder
from tfdist._src.launch.job.ports import Reservation

from .conftest import PATIENT, until

REPORT = """
(here / f"worker-{rank}.json").write_text(json.dumps(config))
"""
HANG = """
ready()
stay()
"""
# It says again and again for whom it waits.
TALKATIVE = {"hosts.rendezvous._REPORT_SECONDS": 0.1}


@pytest.fixture
def at():
    """A free address for the rendezvous."""
    with Reservation(1) as reservation:
        yield f"127.0.0.1:{reservation.ports[0]}"


@pytest.fixture
def start(launch, at):
    """Starts one host, with one worker by default."""

    def host(number, path, *, nnodes=3, workers=1, options=(), **settings):
        own = ["-n", str(workers), "--nnodes", str(nnodes), "--node-rank", str(number)]
        return launch(*own, "--rendezvous", at, *options, path, **settings)

    return host


def port(at):
    return int(at.rpartition(":")[2])


def listens(at):
    return lambda: port_holder(port(at)) is not None


def said(job):
    """Its lines on stderr; a slow host also prints what it is waiting for."""
    return [line for line in job.err.splitlines() if "waiting for host" not in line]


def test_three_hosts_of_different_size(start, script, tmp_path):
    path = script(REPORT)
    jobs = [start(2, path), start(0, path, workers=2), start(1, path, workers=3)]
    for job in jobs:
        assert job.wait() == 0, job.err
        assert said(job) == []
    configs = [json.loads((tmp_path / f"worker-{rank}.json").read_text()) for rank in range(6)]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 6
    for rank, config in enumerate(configs):
        assert config["cluster"]["worker"] == addresses
        assert config["task"] == {"type": "worker", "index": rank}


def test_only_global_rank_0_is_the_chief(start, script):
    jobs = [start(host, script("print('rank', rank)"), nnodes=2, workers=2) for host in (0, 1)]
    assert [job.wait() for job in jobs] == [0, 0]
    assert [job.out for job in jobs] == ["rank 0\n", ""]


def test_the_address_of_each_host(start, script, tmp_path):
    jobs = [
        start(0, script(REPORT), nnodes=2, options=["--host", "host-a"]),
        start(1, script(REPORT), nnodes=2, options=["--host", "fd00::2"]),
    ]
    assert [job.wait() for job in jobs] == [0, 0]
    workers = json.loads((tmp_path / "worker-0.json").read_text())["cluster"]["worker"]
    assert workers[0].startswith("host-a:")
    assert workers[1].startswith("[fd00::2]:")


@pytest.mark.parametrize("failing", some([0, 1, 2], always=[1]))
def test_a_failure_ends_all_hosts(start, script, failing):
    path = script(f"""
        ready()
        wait_for(0, 1, 2)
        if rank == {failing}:
            print("no data", file=sys.stderr)
            sys.exit(7)
        stay()
    """)
    jobs = [start(host, path, options=["--grace", "1"]) for host in range(3)]
    jobs[0].wait_ready(3)
    for host, job in enumerate(jobs):
        assert job.wait() == 7, job.err
        assert f"worker {failing} failed with exit code 7" in job.err
        assert job.processes() == set()
        if failing:
            assert "  | no data" in job.err
            assert (f"on host {failing}" in job.err) == (host != failing)


def test_the_cause_is_found_across_hosts(start, script):
    path = script("""
        if rank == 1:
            print("PeerLostError: worker 2 was lost")
            ready()
            sys.exit(1)
        if rank == 2:
            wait_gone(1)
            sys.exit(9)
        stay()
    """)
    jobs = [start(host, path, seconds=PATIENT) for host in range(3)]
    for job in jobs:
        assert job.wait() == 9, job.err
        assert "worker 2 failed with exit code 9" in job.err


@exhaustive
@pytest.mark.parametrize("dying", [0, 1])
def test_a_launcher_that_dies_ends_all_hosts(start, script, dying):
    jobs = [start(host, script(HANG)) for host in range(3)]
    jobs[0].wait_ready(3)
    jobs[dying].process.kill()
    for host, job in enumerate(jobs):
        if host != dying:
            assert job.wait() == 1
            assert f"host {dying} (127.0.0.1) was lost" in job.err
        job.wait_gone()


@exhaustive
@pytest.mark.parametrize("stopped", [0, 2])
def test_a_signal_to_one_host_ends_all(start, script, stopped):
    jobs = [start(host, script(HANG)) for host in range(3)]
    jobs[0].wait_ready(3)
    jobs[stopped].process.send_signal(signal.SIGTERM)
    for job in jobs:
        assert job.wait() == 143
        assert "was stopped by SIGTERM" in job.err


def test_a_host_that_is_done_waits_for_the_others(start, script):
    path = script("ready()\nif rank == 2: wait_gone(0, 1); sys.exit(4)")
    jobs = [start(host, path) for host in range(3)]
    assert [job.wait() for job in jobs] == [4, 4, 4]


def test_a_host_that_is_done_and_dies_is_no_failure(start, script, tmp_path):
    path = script("ready()\nif rank == 0: wait_for(5)")
    jobs = [start(host, path, nnodes=2) for host in (0, 1)]
    jobs[0].wait_ready(2)
    until(lambda: len(jobs[1].processes()) == 1)  # the watchdog
    time.sleep(1)  # in which it tells host 0
    jobs[1].process.kill()
    jobs[1].wait_gone()
    (tmp_path / "ready-5").touch()
    assert jobs[0].wait() == 0, jobs[0].err


@exhaustive
def test_a_missing_host(start, script):
    late = start(2, script(HANG), seconds=TALKATIVE)
    late.wait_err("waiting for host 0")
    jobs = [start(0, script(HANG), seconds=TALKATIVE, TFDIST_START_TIMEOUT="2"), late]
    for job in jobs:
        assert job.wait() == 1
        assert "host 1 did not connect to 127.0.0.1:" in job.err
        assert "within 2 s: start this command there with --node-rank 1" in job.err
        assert "waiting for host 1" in job.err
        assert "Traceback" not in job.err
    assert "host 0 (127.0.0.1) reports:" in jobs[1].err
    assert not list(jobs[0].folder.glob("ready-*"))


def test_a_wrong_timeout(start, script):
    job = start(0, script(HANG), TFDIST_START_TIMEOUT="soon")
    assert job.wait() == 1
    assert job.err.startswith("tfdist run: error: TFDIST_START_TIMEOUT must be")


def test_host_0_is_missing(start, script):
    job = start(1, script(HANG), seconds=TALKATIVE, TFDIST_START_TIMEOUT="1")
    assert job.wait() == 1
    assert "waiting for host 0 at 127.0.0.1:" in job.err
    assert "did not answer within 1 s: nothing listens there (Connection refused). Start" in job.err


@exhaustive
@pytest.mark.parametrize("number", [0, 1])
def test_the_rendezvous_does_not_resolve(launch, script, number):
    own = ["-n", "1", "--nnodes", "2", "--node-rank", str(number)]
    to = ["--rendezvous", "no-such-host.invalid:40000"]
    job = launch(*own, *to, script(""), seconds=TALKATIVE, TFDIST_START_TIMEOUT="8")
    awaited = "host 0 at no-such-host.invalid:40000: its" if number else "host 1; the"
    job.wait_err(f"tfdist run: waiting for {awaited} name")
    line = next(line for line in job.err.splitlines() if " name " in line)
    assert re.search(
        r"name (no-such-host.invalid )?does not resolve (here )?\(.+\) \(\d s left", line
    )


def test_a_host_may_restart_before_the_start(start, script):
    first = start(0, script(""), seconds=TALKATIVE)
    second = start(1, script(""))
    first.wait_err("waiting for host 2 (")
    second.process.kill()
    first.wait_err("host 1 (127.0.0.1) left before the start")
    jobs = [first, start(1, script("")), start(2, script(""))]
    assert [job.wait() for job in jobs] == [0, 0, 0]


@exhaustive
@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ({"rank": 1, "nnodes": 4}, "was started with --nnodes 4, host 0 with --nnodes 3"),
        ({"rank": 2, "nnodes": 3}, "two hosts were started with --node-rank 2"),
    ],
)
def test_hosts_that_disagree(start, script, second, problem):
    jobs = [start(0, script(""), seconds=TALKATIVE), start(2, script(""))]
    jobs[0].wait_err("waiting for host 1 (")
    jobs.append(start(second["rank"], script(""), nnodes=second["nnodes"]))
    for job in jobs:
        assert job.wait() == 1
        (line,) = said(job)
        assert problem in line


def test_two_hosts_0(start, script, at):
    first = start(0, script(""), nnodes=2)
    until(listens(at))
    second = start(0, script(""), nnodes=2)
    assert second.wait() == 1
    assert "host 0 cannot listen on port" in second.err
    assert f"process {first.process.pid}" in second.err


INFINITE = json.dumps(
    {
        "hello": {"number": float("inf"), "num_hosts": 2, "address": "", "ports": [1]},
        "challenge": "0" * 64,
    }
)


def test_strangers_are_dropped(start, script, at):
    job = start(0, script(""), nnodes=2)
    until(listens(at))
    for data in (b"GET / HTTP/1.1\r\n\r\n", f"{INFINITE}\n".encode(), MAGIC + b"\xff" * 8):
        with socket.create_connection(("127.0.0.1", port(at)), FAR) as stranger:
            stranger.sendall(data)
            assert stranger.recv(100) == b""
    strangers = [socket.create_connection(("127.0.0.1", port(at)), FAR) for _ in range(100)]
    for stranger in strangers:
        with contextlib.suppress(OSError):  # the oldest have been dropped
            stranger.sendall(b"t")
    other = start(1, script(""), nnodes=2)
    assert (job.wait(), other.wait()) == (0, 0)
    for stranger in strangers:
        stranger.close()
    first, *more = [line for line in said(job) if "dropped" in line]
    assert first.startswith("tfdist run: dropped a connection from 127.0.0.1:")
    assert "it does not speak tfdist's protocol" in first
    assert len(more) <= 1 and len(said(job)) == 1 + len(more)


def test_the_rendezvous_is_something_else(start, script, at):
    with socket.create_server(("127.0.0.1", port(at))) as server:
        job = start(1, script(""), nnodes=2)
        connection, _ = server.accept()
        connection.sendall(b"SSH-2.0-OpenSSH\r\n")
        assert job.wait() == 1
        connection.close()
    assert "does not answer as a tfdist launcher (it does not speak tfdist's protocol" in job.err


SECRET = """
(here / f"secret-{rank}").write_text(os.environ.get("TFDIST_SECRET", "none"))
"""


def secrets(tmp_path, count):
    return [(tmp_path / f"secret-{rank}").read_text() for rank in range(count)]


def test_all_workers_get_one_secret(start, script, tmp_path):
    jobs = [start(host, script(SECRET), workers=2) for host in (1, 0, 2)]
    assert [job.wait() for job in jobs] == [0, 0, 0]
    (secret,) = set(secrets(tmp_path, 6))
    assert len(secret) == 64
    for job in jobs:
        assert secret not in job.out + job.err


def test_the_secret_of_all_hosts(start, script, tmp_path):
    jobs = [start(host, script(SECRET), TFDIST_SECRET="hush") for host in range(3)]
    assert [job.wait() for job in jobs] == [0, 0, 0]
    assert secrets(tmp_path, 3) == ["hush"] * 3


@pytest.mark.parametrize(
    ("right", "wrong"),
    some([("hush", "other"), ("hush", ""), ("", "other")], always=[("hush", "other")]),
)
def test_a_host_with_another_secret(start, script, right, wrong):
    first = start(0, script(SECRET), nnodes=2, TFDIST_SECRET=right)
    second = start(1, script(SECRET), nnodes=2, TFDIST_SECRET=wrong)
    assert second.wait() == 1
    assert "refused host 1, process" in second.err
    assert "their secrets differ" in second.err
    assert "Set the same TFDIST_SECRET on all hosts." in second.err
    first.wait_err("does not have the secret; set the same TFDIST_SECRET on all hosts")
    assert "tfdist run: dropped a connection from 127.0.0.1:" in first.err
    assert "it claims to be host 1, process" in first.err
    third = start(1, script(SECRET), nnodes=2, TFDIST_SECRET=right)
    assert (first.wait(), third.wait()) == (0, 0)
    assert "hush" not in first.err + second.err and "other" not in first.err + second.err


def test_a_host_0_without_the_secret_is_not_believed(start, script, at):
    """It accepts any proof, and answers with one that it cannot know."""
    with socket.create_server(("127.0.0.1", port(at))) as server:
        job = start(1, script(SECRET), nnodes=2, TFDIST_SECRET="hush")
        connection, _ = server.accept()
        with connection:
            until_far = time.monotonic() + FAR
            assert read_exactly(connection, len(MAGIC), until_far) == MAGIC
            hello, _ = read_frame(connection, HELLO_LIMIT, until_far)
            challenge = {"challenge": hello["challenge"], "protocol": hello["protocol"]}
            connection.sendall(MAGIC + encode({"kind": "challenge", **challenge}))
            proof, _ = read_frame(connection, HELLO_LIMIT, until_far)
            me = {**hello, "rank": 0, "worker": "host 0"}
            connection.sendall(encode({**me, **proof}))
            begin = {"workers": ["127.0.0.1:1"], "first": 0, "secret": "mine", "running": False}
            with contextlib.suppress(OSError):
                connection.sendall(encode({"kind": "start", "value": begin}))
            assert job.wait() == 1
    assert "does not have the secret; set the same TFDIST_SECRET on all hosts" in job.err
    assert not list(job.folder.glob("secret-*"))


@exhaustive
@pytest.mark.parametrize("answer", [{"kind": "start", "value": {}}, {"kind": "proof"}])
def test_a_host_0_that_sends_no_challenge(start, script, at, answer):
    with socket.create_server(("127.0.0.1", port(at))) as server:
        job = start(1, script(SECRET), nnodes=2)
        connection, _ = server.accept()
        with connection:
            connection.sendall(MAGIC + encode(answer))
            assert job.wait() == 1
    assert "does not answer as a tfdist launcher (it sent no challenge)" in job.err


@exhaustive
def test_hosts_with_certificates(start, script, tmp_path):
    jobs = [start(host, script(SECRET), **variables()) for host in range(3)]
    assert [job.wait() for job in jobs] == [0, 0, 0], [job.err for job in jobs]
    (secret,) = set(secrets(tmp_path, 3))
    assert len(secret) == 64


@exhaustive
def test_a_host_without_certificates(start, script):
    first = start(0, script(""), nnodes=2, **variables())
    second = start(1, script(""), nnodes=2)
    assert second.wait() == 1
    assert "it uses TLS, but this worker does not" in second.err
    first.wait_err("no TLS: it does not use TLS, but this worker does")
    third = start(1, script(""), nnodes=2, **variables())
    assert (first.wait(), third.wait()) == (0, 0)


@exhaustive
def test_a_stranger_that_does_not_fit_does_not_end_an_open_job(start, script, at, launch):
    """Where others can reach host 0, and no secret is set."""
    rank_0 = ["-n", "1", "--nnodes", "2", "--node-rank", "0", "--rendezvous"]
    first = launch(*rank_0, f"0.0.0.0:{port(at)}", script(""))
    second = start(1, script(""), nnodes=3)
    assert second.wait() == 1
    problem = "was started with --nnodes 3, host 0 with --nnodes 2"
    assert f"host 0 (127.0.0.1) reports: host 1 (127.0.0.1) {problem}" in second.err
    first.wait_err(f"not admitted: host 1 (127.0.0.1) {problem}")
    third = start(1, script(""), nnodes=2)
    assert (first.wait(), third.wait()) == (0, 0)


def test_ctrl_c_while_waiting(start, script, at):
    job = start(0, script(HANG))
    until(listens(at))
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert said(job) == []
    job.wait_gone()
