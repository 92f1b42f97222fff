"""`tfdist run --hosts` with OpenSSH's server on two hosts: it starts, stops and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.tiers import exhaustive

from .conftest import MARK, OTHER_SECONDS, Job, until
from .sshd import ssh_hosts
from .test_elastic import BEGIN

VARIABLES = ("LAUNCH_TEST_FOLDER", "CUDA_VISIBLE_DEVICES", "TMPDIR", MARK)
REPORT = """
facts = {"config": config, "environment": dict(os.environ), "arguments": sys.argv[1:]}
facts |= {"folder": os.getcwd(), "net": os.readlink("/proc/self/ns/net")}
(here / f"facts-{rank}.json").write_text(json.dumps(facts))
print("rank", rank)
"""
HANG = """
ready()
stay()
"""
SAVE = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
ready()
stay()
"""


@pytest.fixture
def hosts(tmp_path):
    folder = tmp_path / "ssh"
    folder.mkdir()
    with ssh_hosts(folder) as made:
        yield made


@pytest.fixture
def served(hosts):
    hosts.serve()
    return hosts


@pytest.fixture
def run(hosts, tmp_path, environment):
    """Starts the command on the first host."""
    jobs = []

    def start(
        where,
        path,
        *options,
        list_option="--hosts",
        seconds=None,
        key="key",
        ssh=None,
        arguments=(),
        **settings,
    ):
        how = ["-c", OTHER_SECONDS, json.dumps(seconds)] if seconds else ["-m", "tfdist", "run"]
        passed = [word for name in VARIABLES for word in ("-x", name)]
        reached = hosts.ssh(key) if ssh is None else ssh
        own = [list_option, str(where), "--ssh", reached, *passed, *options]
        command = hosts.inside(0, sys.executable, *how, *own, path, *arguments)
        # In `environment`: what is started by ssh has another.
        jobs.append(Job(tmp_path, command, {**environment, **settings}))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


def facts(folder, rank):
    return json.loads((folder / f"facts-{rank}.json").read_text())


def nothing_left(hosts):
    until(lambda: not hosts.processes(0) + hosts.processes(1))


@exhaustive
def test_workers_are_started_on_two_hosts(served, run, script, tmp_path):
    job = run("10.83.0.1:2,second:1", script(REPORT), arguments=["-n", "a b"])
    assert job.wait() == 0, job.err
    found = [facts(tmp_path, rank) for rank in range(3)]
    addresses = found[0]["config"]["cluster"]["worker"]
    assert [a.rpartition(":")[0] for a in addresses] == ["10.83.0.1", "10.83.0.1", "10.83.0.2"]
    for rank, fact in enumerate(found):
        assert fact["config"]["cluster"]["worker"] == addresses
        assert fact["config"]["task"]["index"] == rank
        assert fact["folder"] == os.getcwd()
        assert fact["arguments"] == ["-n", "a b"]
    assert found[0]["net"] == found[1]["net"] != found[2]["net"]
    assert len({fact["environment"]["TFDIST_SECRET"] for fact in found}) == 1
    assert job.out == "rank 0\n"
    assert job.err == ""


@exhaustive
def test_the_first_host_is_another_one(served, run, script, tmp_path):
    job = run("second:1,localhost:1", script(REPORT), "--output", "all")
    assert job.wait() == 0, job.err
    addresses = facts(tmp_path, 0)["config"]["cluster"]["worker"]
    assert [a.rpartition(":")[0] for a in addresses] == ["10.83.0.2", "10.83.0.1"]
    assert sorted(job.out.splitlines()) == ["localhost: [1] rank 1", "rank 0"]


@exhaustive
def test_a_file_of_hosts(served, run, script, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\nlocalhost slots=1\n\nsecond:2  # the new one\n")
    job = run(file, script(REPORT), list_option="--hostfile")
    assert job.wait() == 0, job.err
    assert len(facts(tmp_path, 2)["config"]["cluster"]["worker"]) == 3


@exhaustive
def test_variables_and_the_secret(served, hosts, run, script, tmp_path):
    secret = "5ecret" * 10
    strange = 'a b\n"c" $HOME \\ ü'
    job = run(
        "localhost:1,second:1",
        script(REPORT + HANG),
        *("-x", "MODE=x=y", "-x", "STRANGE"),
        STRANGE=strange,
        OTHER="1",
        TFDIST_SECRET=secret,
        TFDIST_START_TIMEOUT="77",
    )
    job.wait_ready(2)
    remote = facts(tmp_path, 1)["environment"]
    assert remote["MODE"] == "x=y"
    assert remote["STRANGE"] == strange
    assert remote["TFDIST_START_TIMEOUT"] == "77"
    assert remote["TFDIST_SECRET"] == secret
    assert "OTHER" not in remote
    lines = hosts.processes(0) + hosts.processes(1)
    assert any("tfdist._src.launch.host_agent" in line for line in lines)
    assert not any(secret in line for line in lines)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143


@exhaustive
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_ends_all(served, hosts, run, script, failing):
    path = script(f"""
ready()
wait_for(0, 1)
if rank == {failing}:
    print("no data", file=sys.stderr)
    sys.exit(7)
stay()
""")
    job = run("localhost:1,second:1", path)
    assert job.wait() == 7, job.err
    assert f"worker {failing} failed with exit code 7" in job.err
    assert "no data" in job.err
    nothing_left(hosts)


@exhaustive
@pytest.mark.parametrize(
    ("number", "body", "code"),
    [
        (signal.SIGINT, HANG, 130),
        (signal.SIGTERM, HANG, 143),
        (signal.SIGHUP, SAVE, 75),
        (signal.SIGTERM, SAVE, 75),
    ],
)
@pytest.mark.parametrize("where", ["localhost:1,second:1", "second:1,localhost:1"])
@pytest.mark.parametrize("elastic", [(), ("--elastic", "--spares", "0")], ids=["fixed", "elastic"])
def test_a_signal_ends_all(served, hosts, run, script, number, body, code, where, elastic):
    job = run(where, script(body), *elastic)
    job.wait_ready(2)
    job.process.send_signal(number)
    assert job.wait() == code, job.err
    nothing_left(hosts)


@exhaustive
def test_a_second_interrupt_kills(served, hosts, run, script, tmp_path):
    path = script("""
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: (here / f"heard-{rank}").touch())
ready()
while True: time.sleep(1)
""")
    job = run("second:1,localhost:1", path, "--grace", "1000")
    job.wait_ready(2)
    job.process.send_signal(signal.SIGINT)
    until(lambda: len(list(tmp_path.glob("heard-*"))) == 2)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.err
    nothing_left(hosts)


@exhaustive
@pytest.mark.parametrize("where", ["localhost:1,second:1", "second:1,localhost:1"])
def test_nothing_outlives_the_command(served, hosts, run, script, where):
    job = run(where, script(HANG))
    job.wait_ready(2)
    job.process.kill()
    nothing_left(hosts)


@exhaustive
def test_nothing_outlives_a_command_that_ignores_hangups(served, hosts, run, script):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As with nohup, it is inherited.
    try:
        job = run("localhost:1,second:1", script(HANG))
    finally:
        signal.signal(signal.SIGHUP, before)
    job.wait_ready(2)
    job.process.kill()
    nothing_left(hosts)


@exhaustive
def test_exit_code_255_is_no_lost_connection(served, run, script):
    job = run("second:1,localhost:1", script("sys.exit(-1)"))
    assert job.wait() == 1
    assert "failed with exit code 255" in job.err
    assert "the connection to" not in job.err


@exhaustive
def test_an_ssh_that_never_connects_is_ended(hosts, run, script, tmp_path):
    never = tmp_path / "never"
    never.write_text("#!/bin/sh\nexec sleep 100000\n")
    never.chmod(0o755)
    job = run("localhost:1,second:1", script(HANG), ssh=str(never), TFDIST_START_TIMEOUT="1")
    assert job.wait() == 1
    assert "second did not answer within 1 s: check ssh second" in job.err
    assert not hosts.processes(0) + hosts.processes(1)


@exhaustive
@pytest.mark.parametrize(
    ("ssh", "message"),
    [
        ("", "--ssh must be a command, such as"),
        ("ssh 'x", '--ssh must be a command: No closing quotation. Received: "ssh \'x"'),
        ("/nowhere/ssh", "host second cannot be reached: [Errno 2] No such file or directory"),
    ],
)
def test_a_wrong_command_for_ssh_is_one_clear_line(hosts, run, script, ssh, message):
    job = run("second:1", script(HANG), ssh=ssh)
    assert job.wait() == 1
    assert message in job.err and job.err.count("\n") == 1


@exhaustive
def test_nothing_outlives_a_connection(served, hosts, run, script):
    job = run("localhost:1,second:1", script(HANG))
    job.wait_ready(2)
    kill_ssh(hosts)
    assert job.wait() == 128 + signal.SIGTERM
    assert "the connection to second is lost" in job.err
    nothing_left(hosts)


@exhaustive
def test_an_agent_that_is_killed_leaves_nothing(served, hosts, run, script):
    job = run("localhost:1,second:1", script(HANG))
    job.wait_ready(2)
    words = ["pkill", "-KILL", "-o", "--ns", str(hosts.server(1)), "--nslist", "net", "-f"]
    words.append(r"tfdist\._src\.launch\.host_agent *$")
    subprocess.run(words, check=True)
    assert job.wait() == 1
    nothing_left(hosts)


@exhaustive
def test_an_elastic_job_takes_a_lost_host_in_again(served, hosts, run, script, tmp_path):
    path = script(
        BEGIN.replace('"new"', 'f"new-{rank}"')
        + """
meet()
if rank == 1 and life: step(5); tell("joined")
hear("joined")
"""
    )
    job = run(
        "localhost:1,second:1",
        path,
        *("--elastic", "--spares", "0"),
        seconds={"ssh._RETRY_SECONDS": [0.5, 0.5]},
    )
    until(lambda: (tmp_path / "life-1-0.json").exists())
    kill_ssh(hosts)
    assert job.wait() == 0, job.err
    assert "connecting to second again" in job.err
    assert "has reconnected; its workers join" in job.err
    nothing_left(hosts)


def kill_ssh(hosts):
    words = ["pkill", "-KILL", "--ns", str(hosts.server(0)), "--nslist", "net", "-x", "ssh"]
    subprocess.run(words, check=True)


@exhaustive
@pytest.mark.parametrize(
    ("where", "key", "message"),
    [
        ("localhost:1,nowhere.invalid:1", "key", "nowhere.invalid cannot be reached: ssh: Could"),
        ("localhost:1,10.83.0.9:1", "key", "10.83.0.9 cannot be reached: ssh: connect to host"),
        (
            "localhost:1,second:1",
            "strangers_key",
            "It must work without a password: ssh-copy-id second",
        ),
    ],
)
def test_a_host_that_cannot_be_reached(served, hosts, run, script, where, key, message):
    job = run(where, script(HANG), key=key)
    assert job.wait() == 1
    assert message in job.err
    assert "Traceback" not in job.err
    nothing_left(hosts)


@exhaustive
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cd /nowhere/here", "cannot be started on second: .*/nowhere/here"),
        ("exec /nowhere/python", "cannot be started on second: .*/nowhere/python"),
        ("cat > /dev/null", "second did not answer within 3 s: check ssh second"),
    ],
)
def test_a_host_that_does_not_fit(hosts, run, script, command, message):
    hosts.serve(f"ForceCommand {command}")
    job = run("localhost:1,second:1", script(HANG), TFDIST_START_TIMEOUT="3")
    assert job.wait() == 1
    assert re.search(message, job.err), job.err
    nothing_left(hosts)


@exhaustive
def test_a_greeting_of_the_shell(hosts, run, script):
    hosts.serve('ForceCommand printf "Welcome"; eval "$SSH_ORIGINAL_COMMAND"')
    job = run("second:1,localhost:1", script("print('rank', rank)"))
    assert job.wait() == 0, job.err
    assert job.out == "Welcomerank 0\n"


@exhaustive
def test_a_host_with_another_version_is_refused(hosts, run, script, tmp_path):
    other = tmp_path / "other"
    Path(other).mkdir()
    (other / "sitecustomize.py").write_text("import tfdist._version as v\nv.__version__ = '9.9'\n")
    hosts.serve(f'ForceCommand eval "${{SSH_ORIGINAL_COMMAND/PYTHONPATH=/PYTHONPATH={other}:}}"')
    job = run("localhost:1,second:1", script(HANG))
    assert job.wait() == 1
    assert "second has tfdist 9.9, this host has" in job.err


@exhaustive
@pytest.mark.parametrize("restarts", [0, 1])
def test_jobs_on_hosts_are_restarted_as_often_as_allowed(served, hosts, run, script, restarts):
    path = script("""
if rank == 1 and os.environ["TFDIST_GENERATION"] == "0": sys.exit(5)
ready()
wait_for(0, 1)
""")
    job = run("localhost:1,second:1", path, "--max-restarts", str(restarts))
    assert job.wait() == (0 if restarts else 5), job.err
    nothing_left(hosts)


@exhaustive
def test_a_host_that_is_cut_off(served, hosts, run, script):
    job = run("localhost:1,second:1", script(HANG))
    job.wait_ready(2)
    subprocess.run(hosts.inside(1, "ip", "link", "set", "eth0", "down"), check=True)
    assert job.wait() == 1
    assert "was lost" in job.err
    # The launcher there ends by itself; the server's own process sees it when it ends.
    until(lambda: not any("train.py" in line for line in hosts.processes(1)))
    assert not hosts.processes(0)


@exhaustive
def test_the_machine_of_the_command_vanishes(served, hosts, run, script):
    job = run("second:1", script(HANG), TFDIST_HEARTBEAT_TIMEOUT="20")
    job.wait_ready(1)
    subprocess.run(hosts.inside(1, "ip", "link", "set", "eth0", "down"), check=True)
    until(lambda: not any("train.py" in line for line in hosts.processes(1)))
    job.process.kill()
    until(lambda: not hosts.processes(0))
