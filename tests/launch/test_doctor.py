"""`tfdist doctor`: each check, and the whole command."""

from __future__ import annotations

import configparser
import itertools
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.certificates import variables
from tests.harness import gpus
from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive, some
from tfdist._src.launch.commands import doctor
from tfdist._src.launch.commands.doctor import CHECKS, hardware, software, workers
from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.launch.commands.doctor.workers import ProbeResult
from tfdist._src.launch.job.ports import Reservation
from tfdist._src.native import nvidia

# What a program says of a GPU that another process has the memory of.
TAKEN = {"reader": 0, "owner": 1, "copy": "taken"}


def tf_config(*addresses, index=0):
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}


def rows(section):
    return dict(section.rows)


@pytest.mark.parametrize(
    "title",
    some(
        [title for title in CHECKS if title != "devices"],
        always=[title for title in CHECKS if title not in ("devices", "GPUs")],
    ),
)
def test_every_check_answers(title, tmp_path):
    section = CHECKS[title](Context({"KERAS_HOME": str(tmp_path)}, timeout=FAR))
    assert section.rows
    assert section.problems == []
    assert all(isinstance(text, str) and "\n" not in text for row in section.rows for text in row)


@exhaustive
def test_gpus_are_described_by_their_driver(tmp_path, monkeypatch):
    """Of a driver of threads."""
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "1")
    libraries = gpus.variables(0, "")
    section = CHECKS["GPUs"](Context(libraries))
    found = rows(section)
    assert found["GPU 0"] == "A GPU of threads, sm_90"
    assert found["driver"] == "for CUDA 12.4"
    assert found["NCCL"].startswith("2.21.5, ")
    assert found["all-reduces"] == "by own kernels up to 256 KiB, else by NCCL"
    assert any(value.startswith("not measured by the project: ") for _, value in section.rows)
    assert "copies" not in found
    assert section.problems == []

    files = {f"TFDIST_TLS_{name}": "a.pem" for name in ("CERTIFICATE", "KEY", "CA")}
    found = rows(CHECKS["GPUs"](Context({**libraries, **files})))
    assert found["all-reduces"] == "by own kernels, since NCCL sends in the clear, and TLS is set"
    none = {**libraries, "TFDIST_NCCL_LIBRARY": str(tmp_path / "none.so")}
    assert rows(CHECKS["GPUs"](Context(none)))["NCCL"].startswith("none (NCCL cannot be used: ")
    (problem,) = CHECKS["GPUs"](Context({"CUDA_VISIBLE_DEVICES": "0"})).problems
    assert problem.startswith("GPUs cannot be used (no GPU: ")


def matrix(section):
    """The lines of the matrix, without their heads."""
    lines = [value.split() for name, value in section.rows]
    head = lines.index(["0", "1", "2"])
    return lines[head + 1 : head + 4]


@exhaustive
def test_copies_between_gpus(monkeypatch):
    """Of a driver of threads, three of whose links are broken in turn."""
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "3")
    libraries = gpus.variables(0, "")
    section = CHECKS["GPUs"](Context(libraries))
    cells = matrix(section)
    assert all(cells[i][i] == "-" for i in range(3))
    assert all(float(cells[i][j]) > 0 for i, j in itertools.permutations(range(3), 2))
    found = rows(section)
    assert found["links"] == "all: atomics, as over NVLink; the driver's rank 0"
    assert found["all-reduces"] == "by own kernels up to 256 KiB, else by NCCL"
    assert section.problems == []

    monkeypatch.setenv("FAKE_CUDA_LINKS", "1-0:cut")
    section = CHECKS["GPUs"](Context(libraries))
    assert re.fullmatch(r"\([0-9.]+\)", matrix(section)[1][0])
    found = rows(section)
    assert found["links"].startswith("0-1, 0-2, 1-2, 2-0 and 1 more: ")
    assert found["all-reduces"] == "by NCCL, since GPU 1 does not reach GPU 0's memory"
    assert section.problems == []  # It may be as it is.

    monkeypatch.setenv("FAKE_CUDA_LINKS", "0-2:wrong,2-1:wrong")
    forced = {**libraries, "TFDIST_DEVICE_ALGORITHM": "p2p"}
    section = CHECKS["GPUs"](Context(forced))
    assert (matrix(section)[0][2], matrix(section)[2][1]) == ("wrong", "wrong")
    wrong, impossible = section.problems
    assert wrong.startswith("GPUs 0-2, 2-1: data copied from the second GPU is corrupted")
    assert impossible == (
        "TFDIST_DEVICE_ALGORITHM=p2p cannot be used, since GPU 0 reads wrong data from GPU 2's "
        "memory: unset it"
    )


@exhaustive
def test_a_link_that_hangs_ends_alone(monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "3")
    monkeypatch.setenv("FAKE_CUDA_LINKS", "0-1:stuck")
    section = CHECKS["GPUs"](Context(gpus.variables(0, "")))
    cells = matrix(section)
    assert cells[0][1] == "stuck"
    others = [(i, j) for i, j in itertools.permutations(range(3), 2) if (i, j) != (0, 1)]
    assert all(float(cells[i][j]) > 0 for i, j in others)
    (problem,) = section.problems
    assert problem.startswith("GPUs 0-1: a copy from the second GPU does not finish")
    assert rows(section)["all-reduces"] == "by NCCL, since GPU 0 cannot read GPU 1's memory"


@exhaustive
@pytest.mark.parametrize(
    ("program", "seconds", "cell", "error"),
    [
        ("import time; time.sleep(3600)", 1.0, "failed", "not tried within 1 s"),
        ("raise OSError('the driver is gone')", FAR, "failed", "OSError: the driver is gone"),
        ("import os; os.abort()", FAR, "failed", "exit code -6"),
        (f"print({json.dumps(json.dumps(TAKEN))})", FAR, "taken", "exit code 0"),
    ],
)
def test_copies_that_are_not_tried(program, seconds, cell, error, monkeypatch, tmp_path):
    (tmp_path / "copying.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(nvidia, "_PROGRAM", "copying")
    section = Section()
    hardware.add(section, nvidia.measure("", 2, seconds))
    assert section.rows[2][1].split() == ["-", cell]
    (problem,) = section.problems
    pairs = "1-0" if cell == "taken" else "0-1, 1-0"
    assert problem.startswith(f"GPUs {pairs}: no copy from the second GPU ({error})")


def test_rows_are_aligned():
    lines = Section([("a", "1"), ("a name that is long", "2")]).text("title").splitlines()
    assert lines == ["title", "  a                    1", "  a name that is long  2"]


def test_the_supported_versions_are_those_of_the_package():
    file = configparser.ConfigParser()
    file.read(Path(doctor.__file__).parents[5] / "setup.cfg")
    required = file["options"]["install_requires"].split()
    for package, (least, too_new) in software.SUPPORTED.items():
        bounds = [f">={least}"] * bool(least) + [f"<{too_new}"] * bool(too_new)
        assert package + ",".join(bounds) in required


def test_supported_versions_are_told_from_others():
    for found in ("2.18", "2.18.0", "2.21.3"):
        assert software.supported(found, "2.18", "2.22"), found
    for found in ("2.17.1", "2.9", "2.22.0", "2.22.0rc1", "3.0"):
        assert not software.supported(found, "2.18", "2.22"), found


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ("", r"TensorFlow is missing: pip install 'tensorflow>=2\.18,<2\.22'"),
        ("2.12.0", r"TensorFlow 2\.12\.0 is not supported: pip install 'tensorflow>=2\.18,<2\.22'"),
    ],
)
def test_a_version_that_does_not_fit(found, problem, monkeypatch):
    monkeypatch.setattr(software, "_installed", lambda *names: found)
    section = software.check_versions(Context({}))
    assert re.fullmatch(problem, section.problems[0])


def test_a_version_newer_than_those_tested(monkeypatch):
    monkeypatch.setattr(software, "_installed", lambda *names: "99.1.0rc0")
    section = software.check_versions(Context({}))
    assert rows(section)["Keras"].startswith("99.1.0rc0 (newer than 3.")
    assert rows(section)["NumPy"] == "99.1.0rc0"
    assert not any("Keras" in problem for problem in section.problems)


def test_the_memory_of_a_container(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(str(1 << 29))
    monkeypatch.setattr(hardware, "_MEMORY_LIMITS", (str(tmp_path / "memory.max"),))
    assert rows(hardware.check_host(Context({})))["memory"].endswith("limited to 0.5 GiB")


@pytest.mark.parametrize(
    ("environment", "file", "shown", "problem"),
    [
        ({}, None, "tensorflow (default)", None),
        ({}, {"backend": "tensorflow"}, "tensorflow (", None),
        ({}, {"backend": "torch"}, "torch (", "keras.json"),
        ({"KERAS_BACKEND": "tensorflow"}, {"backend": "torch"}, "tensorflow (KERAS_B", None),
        ({"KERAS_BACKEND": "jax"}, None, "jax (KERAS_BACKEND)", "unset KERAS_BACKEND"),
        ({"TF_USE_LEGACY_KERAS": "1"}, None, "tensorflow", "unset it"),
        ({"TFDIST_START_TIMEOUT": "soon"}, None, "tensorflow", "TFDIST_START_TIMEOUT must be"),
    ],
)
def test_wrong_settings_of_keras_are_problems(environment, file, shown, problem, tmp_path):
    if file is not None:
        (tmp_path / "keras.json").write_text(json.dumps(file))
    section = software.check_settings(Context({**environment, "KERAS_HOME": str(tmp_path)}))
    assert rows(section)["Keras backend"].startswith(shown)
    assert len(section.problems) == (problem is not None)
    assert problem is None or problem in section.problems[0]


def test_variables_are_shown_but_no_secret(tmp_path):
    environment = {"TFDIST_START_TIMEOUT": "60", "TFDIST_SECRET": "hush"}
    section = software.check_settings(Context({**environment, "KERAS_HOME": str(tmp_path)}))
    assert rows(section)["TFDIST_START_TIMEOUT"] == "60"
    assert rows(section)["TFDIST_SECRET"] == "set"


@exhaustive
def test_the_port_of_metrics(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {"TFDIST_METRICS_PORT": str(port - 1), **tf_config("a:1", "a:2", index=1)}
        section = workers.check_metrics(Context(environment))
        assert rows(section)["Prometheus"] == f"port {port} of 127.0.0.1, unusable"
        assert "choose another TFDIST_METRICS_PORT" in section.problems[0]
    assert workers.check_metrics(Context(environment)).problems == []
    monkeypatch.setattr(workers.importlib.util, "find_spec", lambda name: None)
    (problem,) = workers.check_metrics(Context(environment)).problems
    assert "pip install 'tfdist[metrics]'" in problem


def test_without_a_job():
    found = rows(workers.check_workers(Context({})))
    assert found["looked for"].startswith("TF_CONFIG, Open MPI, MPICH, Slurm, ")
    assert (found["found"], found["this process"]) == ("nothing", "a single process")


def test_a_wrong_tf_config():
    section = workers.check_workers(Context({"TF_CONFIG": "{"}))
    assert section.problems[0].startswith("TF_CONFIG is not JSON")


@exhaustive
def test_addresses_that_the_workers_have_yet_to_tell(monkeypatch):
    monkeypatch.setattr(workers, "probe", lambda address, timeout: ProbeResult.REFUSED)
    place = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1"}
    section = workers.check_workers(Context(place))
    found = rows(section)
    assert found["found"] == "torchrun"
    assert found["this process"] == "rank 1 of 3: worker 1"
    assert found["addresses"] == "the workers report theirs to rank 0, at 10.0.0.1:29500"
    assert found["worker 0 (10.0.0.1:29500)"] == ProbeResult.REFUSED.value
    assert section.problems == []
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "0"), ("SIZE", "2"))}
    found = rows(workers.check_workers(Context({**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})))
    assert found["authentication"] == "a secret that rank 0 creates and its launcher sends"
    (problem,) = workers.check_workers(Context({"RANK": "1"})).problems
    assert "WORLD_SIZE is not set" in problem


def test_an_evaluator_is_no_problem():
    config = {"cluster": {"chief": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}
    section = workers.check_workers(Context({"TF_CONFIG": json.dumps(config)}))
    assert "evaluator" in rows(section)["this process"]
    assert section.problems == []


def test_peers_are_probed_and_addresses_in_use_are_problems(monkeypatch):
    with Reservation(2) as held, socket.create_server(("127.0.0.1", 0)) as server:
        own, closed = (f"127.0.0.1:{port}" for port in held.ports)
        listening = f"127.0.0.1:{server.getsockname()[1]}"
        section = workers.check_workers(Context(tf_config(own, closed, listening), timeout=FAR))
        assert section.problems == []
        found = rows(section)
        assert found["this process"].startswith("rank 0 of 3")
        assert found["chief"] == f"worker 0 ({own})"
        assert found["own address"] == "on this host, and free"
        assert found[f"worker 1 ({closed})"] == ProbeResult.REFUSED.value
        assert found[f"worker 2 ({listening})"] == ProbeResult.LISTENING.value
        section = workers.check_workers(Context(tf_config(listening, closed), timeout=FAR))
        assert "is in use by process" in section.problems[0]


def test_an_address_of_another_machine():
    section = workers.check_workers(Context(tf_config("192.0.2.1:4000")))
    assert "not on this machine" in section.problems[0]


def test_a_name_that_does_not_resolve(monkeypatch):
    def fail(address, seconds):
        raise OSError("unknown")

    monkeypatch.setattr(workers, "resolve", fail)
    with Reservation(1) as held:
        own = f"127.0.0.1:{held.ports[0]}"
        section = workers.check_workers(Context(tf_config(own, "nowhere:1"), timeout=FAR))
    assert rows(section)["worker 1 (nowhere:1)"] == ProbeResult.UNRESOLVED.value
    assert "correct it in TF_CONFIG" in section.problems[0]


def test_no_answer():
    """A server whose queue is full lets the next one wait, as a firewall does."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        waiting = [socket.socket() for _ in range(3)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
        assert workers.probe(address, 0.3) is ProbeResult.SILENT
        for sock in waiting:
            sock.close()


def test_a_silent_peer_is_a_problem(monkeypatch):
    monkeypatch.setattr(workers, "probe", lambda address, timeout: ProbeResult.SILENT)
    with Reservation(1) as held:
        own = f"127.0.0.1:{held.ports[0]}"
        section = workers.check_workers(Context(tf_config(own, "10.0.0.2:1"), timeout=2.0))
    assert "no answer within 2 s: check that its host is up" in section.problems[0]


@pytest.mark.parametrize(
    ("program", "shown", "problem"),
    [
        ("print('noise'); print('[\"CPU:0\", \"GPU:0\"]')", "CPU:0, GPU:0", None),
        ("raise ImportError('no such library')", "cannot list", "ImportError: no such library"),
        ("import os; os.abort()", "cannot list", "exit code -6"),
        ("print('nonsense')", "cannot list", "could not be read"),
        ("", "cannot list", "could not be read"),
        ("import os; assert 'TF_CONFIG' not in os.environ; print('[]')", "", None),
    ],
)
def test_devices_of_tensorflow_are_shown(program, shown, problem):
    context = Context({"TF_CONFIG": "x"}, timeout=FAR)
    section = hardware.check_devices(context, program)
    assert rows(section)["TensorFlow"].startswith(shown)
    assert len(section.problems) == (problem is not None)
    assert problem is None or problem in section.problems[0]


def test_devices_that_take_long():
    section = hardware.check_devices(Context({}, timeout=1.0), "import time; time.sleep(3600)")
    assert rows(section)["TensorFlow"].startswith("no answer in 1 s")
    assert "took longer than 1 s" in section.problems[0]


def test_gpus_that_tensorflow_does_not_see():
    context = Context({"CUDA_VISIBLE_DEVICES": "0"}, timeout=FAR)
    section = hardware.check_devices(context, "print('[\"CPU:0\"]')")
    assert "TensorFlow sees none" in section.problems[0]


def run(environment, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "tfdist", "doctor", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


@exhaustive
def test_the_whole_command(environment, tmp_path):
    done = run({**environment, "KERAS_HOME": str(tmp_path)}, "--timeout", str(FAR))
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    assert done.stdout.endswith("\nNo problems found.\n")
    assert "  TensorFlow      CPU:0" in done.stdout
    assert all(f"{title}\n" in done.stdout for title in CHECKS)


def test_the_whole_command_with_problems(environment, tmp_path):
    changes = {"KERAS_HOME": str(tmp_path), "TF_CONFIG": "{", "KERAS_BACKEND": "jax"}
    done = run({**environment, **changes}, "--timeout", "0.01")
    assert done.returncode == 1
    problems = done.stdout.split("\nProblems:\n")[1]
    assert [line[:4] for line in problems.splitlines()] == ["  1.", "  2.", "  3."]


def test_a_wrong_command_line(environment):
    done = run(environment, "--timeout", "no")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_certificates_are_shown_and_expired_ones_are_problems():
    assert rows(workers.check_tls(Context({}))) == {"between workers": "off"}
    good = workers.check_tls(Context(variables()))
    assert good.problems == []
    assert rows(good)["between workers"] == "on"
    assert re.fullmatch("commonName=worker, until .* 2120 GMT", rows(good)["certificate"])
    (problem,) = workers.check_tls(Context(variables("expired"))).problems
    assert "(certificate has expired)" in problem
    part = Context({"TFDIST_TLS_CA": "/ca.pem"})
    assert (len(software.check_settings(part).problems), workers.check_tls(part).problems) == (
        1,
        [],
    )
