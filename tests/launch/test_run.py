"""`tfdist run` on one host: what the workers get, and how the job ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest

from tests.harness.tiers import exhaustive, some
from tfdist._src.launch.job.resources import available_cores

from .conftest import PATIENT

REPORT = """
(here / f"worker-{rank}.json").write_text(json.dumps(
    {"arguments": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd(),
     "session": os.getsid(0) == os.getpid(), "unbuffered": sys.stdout.write_through}))
"""


def reports(folder: Path) -> list[dict]:
    paths = sorted(folder.glob("worker-*.json"))
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.smoke
def test_what_each_worker_gets(launch, script, tmp_path):
    job = launch("-n", "3", script(REPORT), "--epochs", "3", "-n", "5")
    assert job.wait() == 0, job.err
    workers = reports(tmp_path)
    configs = [json.loads(worker["environment"]["TF_CONFIG"]) for worker in workers]
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": rank} for rank in range(3)
    ]
    addresses = configs[0]["cluster"]["worker"]
    assert all(config["cluster"] == {"worker": addresses} for config in configs)
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    share = str(max(1, available_cores() // 3))
    for worker in workers:
        assert worker["arguments"] == ["--epochs", "3", "-n", "5"]
        assert worker["environment"]["OMP_NUM_THREADS"] == share
        assert worker["environment"]["TF_NUM_INTRAOP_THREADS"] == share
        assert worker["environment"]["TF_NUM_INTEROP_THREADS"] == str(max(2, int(share)))
        assert worker["session"]
        assert worker["unbuffered"]
        assert worker["cwd"] == os.getcwd()
    assert job.err == ""


def test_what_the_user_has_set_stays(launch, script, tmp_path):
    job = launch("-n", "2", script(REPORT), OMP_NUM_THREADS="9", LD_FOO="bar", EMPTY="")
    assert job.wait() == 0, job.err
    for worker in reports(tmp_path):
        assert worker["environment"]["EMPTY"] == ""
        assert worker["environment"]["OMP_NUM_THREADS"] == "9"
        assert worker["environment"]["LD_FOO"] == "bar"


def test_every_job_has_a_secret_of_its_own(launch, script, tmp_path):
    found = set()
    for _ in range(2):
        job = launch("-n", "2", "--output", "all", script(REPORT))
        assert job.wait() == 0, job.err
        (secret,) = {worker["environment"]["TFDIST_SECRET"] for worker in reports(tmp_path)}
        assert len(secret) == 64
        assert secret not in job.out + job.err
        found.add(secret)
    assert len(found) == 2


def test_the_users_secret(launch, script, tmp_path):
    assert launch("-n", "2", script(REPORT), TFDIST_SECRET="hush").wait() == 0
    secrets = [worker["environment"]["TFDIST_SECRET"] for worker in reports(tmp_path)]
    assert secrets == ["hush", "hush"]


@pytest.mark.parametrize("secret", ["", "hush"])
def test_dry_run_does_not_print_the_secret(launch, script, secret):
    job = launch("-n", "2", "--dry-run", script(REPORT), TFDIST_SECRET=secret)
    assert job.wait() == 0
    assert "SECRET" not in job.out + job.err and "hush" not in job.out + job.err


def test_gpus_are_shared_out(launch, script, tmp_path):
    job = launch(script(REPORT), CUDA_VISIBLE_DEVICES="4,5,6")
    assert job.wait() == 0, job.err
    visible = [worker["environment"]["CUDA_VISIBLE_DEVICES"] for worker in reports(tmp_path)]
    assert visible == ["4", "5", "6"]


def test_too_few_gpus_is_said_once(launch, script, tmp_path):
    job = launch("-n", "2", script(REPORT), CUDA_VISIBLE_DEVICES="0")
    assert job.wait() == 0, job.err
    assert job.err.count("all workers use the CPU") == 1
    job = launch("-n", "2", "--gpus-per-worker", "1", script(REPORT), CUDA_VISIBLE_DEVICES="0")
    assert job.wait() == 1
    assert job.err.startswith("tfdist run: error: --gpus-per-worker 1 with 2 workers")


def test_a_module_is_run_with_its_arguments(launch, script, environment, tmp_path):
    (tmp_path / "package").mkdir()
    script(REPORT, "package/train.py")
    path = f"{environment['PYTHONPATH']}{os.pathsep}{tmp_path}"
    job = launch("-n", "2", "-m", "package.train", "-m", "x", PYTHONPATH=path)
    assert job.wait() == 0, job.err
    assert [worker["arguments"] for worker in reports(tmp_path)] == [["-m", "x"]] * 2


def test_tf_config_in_the_launchers_environment_is_replaced(launch, script, tmp_path):
    job = launch("-n", "2", script(REPORT), TF_CONFIG="{}")
    assert job.wait() == 0
    assert job.err.count("\n") == 1
    assert "TF_CONFIG is already set and is replaced" in job.err
    assert len({worker["environment"]["TF_CONFIG"] for worker in reports(tmp_path)}) == 2


def test_ports_are_held_while_the_job_runs_and_the_workers_can_listen(launch, script):
    job = launch(
        "-n",
        "2",
        script("""
            import socket
            port = int(config["cluster"]["worker"][rank].rsplit(":")[1])
            try:
                socket.socket().bind(("127.0.0.1", port))
                sys.exit(3)
            except OSError:
                pass
            server = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
            ready()
            wait_for(0, 1)
            for address in config["cluster"]["worker"]:
                host, port = address.rsplit(":")
                socket.create_connection((host, int(port))).close()
            (here / f"ready-{rank + 10}").touch()
            wait_for(10, 11)
        """),
    )
    assert job.wait() == 0, job.err


def test_ports_are_free_after_the_job(launch, script, tmp_path):
    assert launch("-n", "1", script(REPORT)).wait() == 0
    config = json.loads(reports(tmp_path)[0]["environment"]["TF_CONFIG"])
    host, port = config["cluster"]["worker"][0].split(":")
    with socket.socket() as sock:
        sock.bind((host, int(port)))


def test_a_job_that_ends_well_leaves_no_folder(launch, script, tmp_path):
    job = launch("-n", "2", script("print('hello', rank)"))
    assert job.wait() == 0
    assert (job.out, job.err) == ("hello 0\n", "")
    assert list((tmp_path / "temporary").iterdir()) == []
    assert job.processes() == set()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("how", "code", "said"),
    some(
        [
            ("sys.exit(7)", 7, "failed with exit code 7"),
            ("raise ValueError('bad')", 1, "failed with exit code 1"),
            ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was killed by SIGSEGV"),
            ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
            ("os._exit(255)", 255, "failed with exit code 255"),
        ],
        always=[("sys.exit(7)", 7, "failed with exit code 7")],
    ),
)
def test_the_first_failure_ends_the_job(launch, script, how, code, said):
    job = launch(
        "-n",
        "3",
        script(f"""
            ready()
            if rank == 1:
                wait_for(0, 2)
                for number in range(30):
                    print("line", number)
                {how}
            stay()
        """),
    )
    job.wait_ready(3)
    assert job.wait() == code
    assert f"tfdist run: worker 1 {said}" in job.err
    assert "  | line 29" in job.err
    assert "  | line 9\n" not in job.err
    log = Path(re.search(r"Full output: (\S+)", job.err)[1])
    assert log.read_text().startswith("line 0\nline 1\n")
    assert job.processes() == set()


@exhaustive
def test_the_chiefs_failure(launch, script):
    job = launch("-n", "2", script("if rank == 0: sys.exit(5)\nstay()"))
    assert job.wait() == 5
    assert "worker 0 failed with exit code 5. Its output is above." in job.err


def test_a_lone_worker(launch, script):
    job = launch("-n", "1", script("print('hello'); sys.exit(5)"))
    assert job.wait() == 5
    assert job.out == "hello\n"
    assert job.err == "tfdist run: worker 0 failed with exit code 5. Its output is above.\n"


def test_the_cause_is_shown_and_not_its_victim(launch, script):
    """Worker 1 loses its peer and is gone before worker 2, which is the cause."""
    job = launch(
        "-n",
        "3",
        script("""
            if rank == 1:
                print("tfdist.errors.PeerLostError: worker 2 was lost")
                ready()
                sys.exit(1)
            if rank == 2:
                wait_gone(1)
                print("out of paper")
                sys.exit(9)
            stay()
        """),
        seconds=PATIENT,
    )
    assert job.wait() == 9
    assert "worker 2 failed with exit code 9" in job.err
    assert "out of paper" in job.err
    assert "worker 1" not in job.err


def test_the_chief_as_a_victim(launch, script):
    job = launch(
        "-n",
        "2",
        script("""
            if rank == 0:
                ready()
                sys.exit(1)
            wait_gone(0)
            sys.exit(9)
        """),
        seconds=PATIENT,
    )
    assert job.wait() == 9


@exhaustive
def test_a_victim_alone_is_shown(launch, script):
    job = launch("-n", "2", script("if rank == 1: sys.exit('UnavailableError: gone')\nstay()"))
    assert job.wait() == 1
    assert "  | UnavailableError: gone" in job.err


def test_a_worker_that_ends_well_early_is_no_failure(launch, script):
    job = launch(
        "-n", "2", script("if rank == 1: ready(); sys.exit(0)\nwait_gone(1)\nprint('end', rank)")
    )
    assert job.wait() == 0
    assert job.out == "end 0\n"


def test_what_a_worker_leaves_behind_ends_with_it(launch, script):
    job = launch(
        "-n",
        "1",
        script("subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])"),
    )
    assert job.wait() == 0
    job.wait_gone()


def test_a_worker_that_cannot_be_started(launch, script, tmp_path):
    """Its TF_CONFIG is longer than the system takes."""
    job = launch("-n", "500", "--host", "h" * 300, script("stay()"))
    assert job.wait() == 1
    assert "tfdist run: error: worker 0 could not be started: " in job.err
    assert job.processes() == set()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_dry_run_prints_commands_and_starts_nothing(launch, script, tmp_path):
    job = launch("-n", "2", "--dry-run", script(REPORT), "--text", "a b")
    assert job.wait() == 0
    lines = job.out.splitlines()
    assert len(lines) == 2
    assert reports(tmp_path) == []
    for rank, line in enumerate(lines):
        words = shlex.split(line)
        assert words[-5:] == [sys.executable, "-u", str(tmp_path / "train.py"), "--text", "a b"]
        settings = dict(word.split("=", 1) for word in words[:-5])
        assert json.loads(settings["TF_CONFIG"])["task"]["index"] == rank
        assert "OMP_NUM_THREADS" in settings


def test_dry_run_of_one_host_of_several(launch, script):
    line = "-n 2 --nnodes 2 --node-rank 1 --rendezvous 10.0.0.1:4000 --dry-run"
    job = launch(*line.split(), script(""))
    assert job.wait() == 0
    tasks = [
        json.loads(shlex.split(line)[0].split("=", 1)[1])["task"]["index"]
        for line in job.out.splitlines()
    ]
    assert tasks == [2, 3]
    assert "the other hosts are not contacted" in job.err
