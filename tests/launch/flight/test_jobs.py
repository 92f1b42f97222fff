"""Flight logs of real jobs in which a worker fails: the doctor names it, and why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[3]
SCRIPT, TRAINING = (str(Path(__file__).parent / f"{name}.py") for name in ("script", "training"))
SETTINGS = {
    "killed": {},
    "raises": {},
    "another collective": {},
    "signal": {},
    "sleeps": {"TFDIST_STALL_WARNING": "2"},
    "sleeps in a part": {"TFDIST_STALL_WARNING": "2"},
    "is late to an exchange": {"TFDIST_STALL_WARNING": "2"},
    "misses an exchange": {"TFDIST_COLLECTIVE_TIMEOUT": "3"},
    "stopped": {"TFDIST_HEARTBEAT_TIMEOUT": "4"},
}


def of_failure(found):
    """Whom the error that ended the job names first, and the error."""
    # The session's messages begin with the rank.
    return found["message"].partition("rank 1, ")[2] or found["message"], found["message"]


def of_absence(found):
    """The only worker that is waited for; what in, and where it is."""
    (absent,) = found["absent"]
    return absent["worker"], f"{found['operation']['what']}: {absent['frames'][:1]}"


def of_mismatch(found):
    """The worker that called this, and what it called."""
    (call,) = [one for one in found["calls"] if "broadcast" in one["what"]]
    (worker,) = call["workers"]
    return worker, call["what"]


def of_cycle(found):
    """The worker that waits elsewhere than in the exchange, for which another one waits."""
    (link,) = [one for one in found["links"] if one["operation"]["communicator"] == "session"]
    return link["waits_for"], link["operation"]["what"]


CAUSES = {
    "killed": of_failure,
    "raises": of_failure,
    "another collective": of_mismatch,
    "sleeps": of_absence,
    "sleeps in a part": of_absence,
    "is late to an exchange": of_absence,
    "misses an exchange": of_cycle,
    "stopped": of_failure,
}
WORDS = {
    "killed": "is lost: ",
    "raises": "ValueError: bad data",
    "another collective": "broadcast 'weights'",
    "sleeps": "all_reduce 'the last' float32[7] sum: ['load_slowly (",
    "sleeps in a part": "all_reduce 'in a part' float32[7] sum: ['load_slowly (",
    "is late to an exchange": "exchange 'options': ['load_slowly (",
    "misses an exchange": "exchange 'options'",
    "stopped": "is lost: ",
}


def run(folder, workers, *script, **settings):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings}
    command = [sys.executable, "-m", "tfdist", "run", "-n", str(workers), "--log-dir", str(folder)]
    script = map(str, script)
    return subprocess.run(
        [*command, *script],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=FAR,
    )


def doctor(folder, *options):
    done = subprocess.run(
        [sys.executable, "-m", "tfdist", "doctor", "--flight", str(folder), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@exhaustive
@pytest.mark.parametrize(("workers", "of_a_host"), [(2, 2), (3, 3), (3, 1), (4, 4), (4, 2)])
@pytest.mark.parametrize("fault", [name for name in SETTINGS if name != "signal"])
def test_the_doctor_names_the_worker(fault, workers, of_a_host, tmp_path):
    settings = SETTINGS[fault] | ({"HOSTS_OF": str(of_a_host)} if of_a_host < workers else {})
    job = run(tmp_path, workers, SCRIPT, fault, **settings)
    goes_on = fault in ("sleeps", "sleeps in a part", "is late to an exchange")
    assert (job.returncode == 0) == goes_on, job.stderr
    logs = sorted(path.name for path in tmp_path.glob("flight-*.json"))
    gone = fault in ("killed", "stopped")
    ranks = [rank for rank in range(workers) if not (gone and rank == 1)]
    assert logs == [f"flight-rank{rank}.json" for rank in ranks]
    assert not list(tmp_path.glob("*.tmp"))
    first = json.loads(doctor(tmp_path, "--json"))["findings"][0]
    subject, cause = CAUSES[fault](first)
    assert subject.startswith("worker 1 (127.0.0.1:"), first
    assert WORDS[fault] in cause, first
    assert f"  1. {first['text'].partition(':')[0]}" in doctor(tmp_path)


@exhaustive
@pytest.mark.parametrize(
    ("workers", "of_a_host", "kind", "place", "late"),
    [
        (2, 2, "fit", "input", 0),
        (3, 1, "fit", "input", 2),
        (4, 2, "int8", "input", 1),
        (2, 1, "1f1b", "input", 0),
        (3, 3, "fit", "compute", 0),
        (4, 2, "fit", "callback", 2),
        (2, 1, "int8", "callback", 0),
        (3, 3, "1f1b", "compute", 1),
        (4, 2, "1f1b", "callback", 3),
    ],
)
def test_the_doctor_names_the_worker_that_a_training_waits_for(
    workers, of_a_host, kind, place, late, tmp_path
):
    arguments = (kind, place, late, of_a_host, "is late")
    job = run(tmp_path, workers, TRAINING, *arguments, TFDIST_STALL_WARNING="3")
    assert job.returncode == 0, job.stderr
    logs = sorted(path.name for path in tmp_path.glob("flight-*.json"))
    # Also those whose neighbours in the pipeline waited, but not they themselves.
    assert logs == [f"flight-rank{rank}.json" for rank in range(workers)]
    report = doctor(tmp_path)
    first = next(line for line in report.splitlines() if line.startswith("  1. "))
    assert f" worker {late} (127.0.0.1:" in first.partition(" Its ")[0], report
    assert ("for its next batch" in first) == (place == "input"), report
    where = "load_slowly (" if place == "callback" else "<module> ("
    assert f"Its Python main thread was in {where}" in first, report


@exhaustive
@pytest.mark.parametrize(
    ("workers", "of_a_host", "kind", "place", "lost", "fault"),
    [
        (2, 1, "1f1b", "compute", 1, "is killed"),
        (4, 2, "1f1b", "callback", 2, "is stopped"),
        (4, 2, "int8", "compute", 1, "is stopped"),
        (2, 1, "int8", "input", 1, "is killed"),
        (4, 2, "fit", "callback", 3, "is killed"),
    ],
)
def test_the_doctor_names_the_worker_that_a_training_loses(
    workers, of_a_host, kind, place, lost, fault, tmp_path
):
    arguments = (kind, place, lost, of_a_host, fault)
    job = run(tmp_path, workers, TRAINING, *arguments, **SETTINGS["stopped"])
    assert job.returncode != 0
    logs = sorted(path.name for path in tmp_path.glob("flight-*.json"))
    assert logs == [f"flight-rank{rank}.json" for rank in range(workers) if rank != lost]
    found = json.loads(doctor(tmp_path, "--json"))
    assert [one.partition(" (")[0] for one in found["without_log"]] == [f"worker {lost}"]
    first = found["findings"][0]
    assert first["kind"] == "failure", first
    begin = rf"(rank {lost}, )?worker {lost} \(127\.0\.0\.1:\d+\) is lost: "
    assert re.match(begin, first["message"]), first


@exhaustive
def test_a_signal_has_the_log_written_and_the_job_goes_on(tmp_path):
    job = run(tmp_path, 2, SCRIPT, "signal")
    assert job.returncode == 0, job.stderr
    assert [path.name for path in tmp_path.glob("flight-*.json")] == ["flight-rank0.json"]
    log = json.loads((tmp_path / "flight-rank0.json").read_text())
    assert [reason["kind"] for reason in log["reasons"]] == ["signal"]
    assert "time.sleep" in log["stacks"] or "script.py" in log["stacks"]
    names = [record["name"] for record in log["communicators"][0]["records"]]
    assert names[-5:] == [f"step {n}" for n in range(5)]


@exhaustive
@pytest.mark.parametrize(
    ("arguments", "settings", "reason"),
    [
        (["without a folder"], {}, "TFDIST_FLIGHT_DIR is not set"),
        ([], {"TFDIST_FLIGHT_DIR": "/dev/null/logs"}, "Not a directory"),
        ([], {"TFDIST_NATIVE": "0"}, "native collective"),
        (["the user's"], {"TFDIST_NATIVE": "0"}, None),
        ([], {}, None),
    ],
    ids=["no folder", "a wrong folder", "no native core", "the user's", "written"],
)
def test_a_signal_ends_no_worker_where_no_log_is_written(arguments, settings, reason, tmp_path):
    job = run(tmp_path, 2, Path(SCRIPT).with_name("signalled.py"), *arguments, **settings)
    assert job.returncode == 0, job.stderr
    assert "total 2.0" in job.stdout
    said = [line for line in job.stderr.splitlines() if "SIGUSR1 writes no flight log" in line]
    # Of the chief, whose output this is.
    assert len(said) == (2 if reason else 0), job.stderr
    assert all(reason in line for line in said), said
    assert job.stdout.count("the user's handler") == (2 if arguments == ["the user's"] else 0)


@exhaustive
def test_a_directory_that_cannot_be_made_is_told_once(tmp_path):
    (tmp_path / "file").write_text("")
    job = run(tmp_path, 2, SCRIPT, "sleeps", TFDIST_FLIGHT_DIR=str(tmp_path / "file" / "logs"))
    assert job.returncode == 0, job.stderr
    said = [line for line in job.stderr.splitlines() if "no flight log will be written" in line]
    assert len(said) == 1  # of the chief, whose output this is
