"""The benchmark of recovery lets a worker fail, and reads what that cost from their notes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
TORCH_PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)  # A Python that has torch.


# By name: the notes of each process as (time, event, number) and perhaps its end; process 1 gets
# the signal at second 10; then what it cost.
TIMELINES: dict[str, tuple[dict[int, Any], Any]] = {
    "nothing new yet": (
        {0: [(0, "start", 0), (9, "step", 7), (11, "failed", 0)], 1: [(0, "start", 1)]},
        None,
    ),
    "restarted from a snapshot": (
        {
            0: [(0, "start", 0), (9, "step", 7), (10.5, "failed", 0)],
            1: [(0, "start", 1), (9, "step", 7)],
            2: [(15, "start", 0), (18, "step", 6), (19, "step", 7), (20, "step", 8)],
            3: [(15, "start", 1), (18.5, "step", 6), (19.5, "step", 7), (20.5, "step", 8)],
        },
        (0.5, 8, 10, 2),
    ),
    "in the same process": (
        {
            0: [(0, "start", 0), (9, "step", 7), (10.5, "failed", 0), (12, "step", 8)],
            1: [(0, "start", 1), (9, "step", 7)],
        },
        (0.5, 2, 2, 0),
    ),
    # The other has ended the step in which the fault came, and worker 2 the one after it.
    "steps end after the signal": (
        {
            0: [(0, "start", 0), (10.1, "step", 8), (11, "failed", 0), (14, "step", 9)],
            1: [(0, "start", 1), (9, "step", 7)],
            2: [(0, "start", 2), (11.2, "step", 9), (11.5, "failed", 0), (14.2, "step", 10)],
        },
        (1, 4, 4.2, 1),
    ),
    "the other ends without a word": (
        {
            0: ([(0, "start", 0), (9, "step", 7)], 10.25),
            1: ([(0, "start", 1), (9, "step", 7)], 10.0),
            2: [(15, "start", 0), (18, "step", 1), (19, "step", 8)],
        },
        (0.25, 8, 9, 1),
    ),
    # A stopped one that is woken counts for nothing, and an error before the signal neither.
    "the victim goes on": (
        {
            0: [(0, "start", 0), (5, "failed", 0), (9, "step", 7), (13, "failed", 0)],
            1: [(0, "start", 1), (9, "step", 7), (12, "failed", 0), (12.5, "step", 8)],
        },
        None,
    ),
    "nobody notices": (
        {
            0: [(0, "start", 0), (9, "step", 7)],
            1: [(0, "start", 1)],
            2: [(15, "start", 0), (16, "step", 8)],
        },
        (None, 6, 6, 0),
    ),
}


def test_the_cost_of_a_fault_is_read_from_the_notes() -> None:
    from benchmarks.recovery.marks import Mark
    from benchmarks.recovery.timeline import Life, Recovery, recovery

    for name, (processes, expected) in TIMELINES.items():
        lives = {}
        for process, notes in processes.items():
            events, ended = notes if isinstance(notes, tuple) else (notes, None)
            lives[process] = Life(tuple(Mark(*event) for event in events), ended)
        found = recovery(lives, victim=1, signalled=10.0)
        assert found == (expected and Recovery(*map(pytest.approx, expected))), name


@exhaustive
def test_notes_are_read_as_they_are_written(tmp_path: Path) -> None:
    from benchmarks.recovery.marks import Notes, parse

    notes = Notes(str(tmp_path), 3)
    notes.write("step", 12)
    (file,) = tmp_path.iterdir()
    assert file.name == str(os.getpid())
    text = file.read_text()
    assert [(m.event, m.number) for m in parse(text)] == [("start", 3), ("step", 12)]
    assert parse(text)[0].time <= parse(text)[1].time
    assert parse(text[:-1]) == parse(text)[:1]  # A line that is not whole yet.
    assert parse("") == ()


@exhaustive
def test_the_victim_is_of_its_rank_once_all_train() -> None:
    from benchmarks.recovery.faults import find_victim
    from benchmarks.recovery.marks import Mark
    from benchmarks.recovery.timeline import Life

    def life(rank: int, step: int) -> Life:
        steps = [Mark(1.0, "step", step)] if step else []
        return Life((Mark(0.0, "start", rank), *steps))

    lives = {70: life(1, 5), 71: life(0, 5)}
    assert find_victim(lives, 2, 1, 5) == 70
    assert find_victim(lives, 2, 0, 5) == 71
    assert find_victim(lives, 2, 0, 6) is None
    assert find_victim(lives, 3, 0, 5) is None
    assert find_victim({**lives, 72: life(2, 0)}, 3, 0, 5) is None


@exhaustive
def test_each_case_has_its_launcher_and_takes_its_turn() -> None:
    from benchmarks.recovery.cases import Case, Order, cases
    from benchmarks.recovery.faults import turns

    found = cases(["restart", "elastic", "torchrun", "restart"], ["yes", "no"])
    names = [(case.backend, case.respawn) for case in found]
    assert names == [("restart", ""), ("elastic", "yes"), ("elastic", "no"), ("torchrun", "")]
    order = Order("restart", "mlp", 3, "/folder", 50, 5.0)
    restart, elastic, fewer, torchrun = (case.command(order, "/torch/python") for case in found)
    assert restart[:4] == [sys.executable, "-m", "tfdist", "run"]
    assert "--elastic" in elastic and "--elastic" in fewer and elastic != fewer
    assert "--elastic" not in restart
    assert torchrun[:3] == ["/torch/python", "-m", "torch.distributed.run"]
    for command, script in ((restart, "keras_script.py"), (torchrun, "torch_script.py")):
        assert command[-3] == "3"
        assert Path(command[-2]) == FOLDER / "recovery" / script
        assert Order(**json.loads(command[-1])) == order
    a, b = Case("restart"), Case("torchrun")
    assert turns([a, b], 3) == [a, b, b, a, a, b]
    assert turns([], 3) == []


@exhaustive
def test_a_row_has_medians_and_what_went_wrong() -> None:
    from benchmarks.recovery.cases import Case
    from benchmarks.recovery.fault_figures import format_table, make_row
    from benchmarks.recovery.faults import Results
    from benchmarks.recovery.timeline import Recovery

    found = [Recovery(0.5, 2.0, 4.0, 40), Recovery(None, 3.0, 9.0, 42), Recovery(0.1, 1.0, 5.0, 41)]
    row = make_row(Case("elastic", "no"), "kill", 3, Results(found, ["it took more than 9 s"]))
    assert row == {
        "backend": "elastic",
        "respawn": "no",
        "fault": "kill",
        "workers": 3,
        "rounds": 3,
        "failed": 1,
        "failure": "it took more than 9 s",
        "detect_s": pytest.approx(0.3),
        "detect_low": 0.1,
        "detect_high": 0.5,
        "first_step_s": 2.0,
        "first_step_low": 1.0,
        "first_step_high": 3.0,
        "next_step_s": 5.0,
        "next_step_low": 4.0,
        "next_step_high": 9.0,
        "steps_lost": 41,
        "steps_lost_low": 40,
        "steps_lost_high": 42,
    }
    never = make_row(Case("restart"), "stop", 2, Results([], ["the job ended", "no answer"]))
    assert never == {"backend": "restart", "fault": "stop", "workers": 2, "missing": "no answer"}
    unnoticed = make_row(Case("restart"), "stop", 2, Results([Recovery(None, 1.0, 1.0, 0)]))
    assert "detect_s" not in unnoticed
    table = format_table([row, never])
    assert "5.00  4.00  9.00" in table
    assert "missing: no answer" in table


@exhaustive
def test_a_job_that_ends_is_reported_with_its_cause_and_leaves_no_process(tmp_path: Path) -> None:
    from benchmarks.recovery.job import Job
    from benchmarks.step_time.members import TeamError

    # A child in a session of its own, which outlives the launcher.
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '3600'], start_new_session=True)\n"
        "print(f'ValueError: no luck, {child.pid}')\n"
        "print('a summary')\n"
        "sys.exit(3)"
    )
    job = Job([sys.executable, "-c", script], str(tmp_path), {})
    try:
        with pytest.raises(TeamError, match="exit code 3: ValueError: no luck") as raised:
            job.wait(lambda lives: None, FAR)
    finally:
        job.stop()
    child = int(str(raised.value).split("no luck, ")[1].split(" ")[0])
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or ") Z " in state.read_text()


@exhaustive
def test_the_end_of_a_process_is_noticed(tmp_path: Path) -> None:
    from benchmarks.recovery.job import Job

    script = (
        "import time\nfrom benchmarks.recovery.marks import Notes\n"
        f"Notes({str(tmp_path)!r}, 4)\ntime.sleep(3600)"
    )
    job = Job([sys.executable, "-c", script], str(tmp_path), {})
    try:
        process = job.wait(lambda lives: next(iter(lives), None), FAR)
        assert job.lives[process].rank == 4
        signalled = job.signal(process, signal.SIGKILL)
        ended = job.wait(lambda lives: lives[process].ended, FAR)
        assert ended >= signalled
    finally:
        job.stop()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.recovery", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def check_row(row: dict[str, Any], backend: str, lost: int) -> None:
    assert row["backend"] == backend, row
    assert "missing" not in row and "failed" not in row, row
    assert row["fault"] == "kill" and row["workers"] == 2 and row["rounds"] == 1
    assert 0 < row["detect_s"] < row["first_step_s"] <= row["next_step_s"]
    assert 0 <= row["steps_lost"] <= lost + 1  # Another may have ended the step of the fault.


@exhaustive
def test_a_killed_worker_costs_the_steps_since_the_snapshot(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    short = ["--fault_model=tiny", "--faults=kill", "--rounds=1", "--fault_step=12"]
    backends = ["--save_every=5", "--backends=restart,torchrun", "--torch_python=/no/python"]
    done = run(*short, *backends, f"--json={file}")
    assert done.returncode == 0, done.stderr
    restart, torchrun = json.loads(file.read_text())
    # The snapshot of step 10 may not have been written in time.
    check_row(restart, "restart", 12)
    assert torchrun["missing"].startswith("/no/python does not run")
    assert "torchrun is skipped: /no/python does not run" in done.stderr
    assert "missing: /no/python does not run" in done.stdout


@exhaustive
def test_torchrun_is_measured_where_there_is_torch(tmp_path: Path) -> None:
    find = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    if subprocess.run([TORCH_PYTHON, "-c", find]).returncode:
        pytest.skip("there is no torch; set TORCH_PYTHON")
    file = tmp_path / "rows.json"
    short = ["--fault_model=tiny", "--faults=kill", "--rounds=1", "--fault_step=12"]
    # Steps of a small model may take long on a machine that does other work.
    backends = ["--save_every=5", "--backends=torchrun", "--silence=60"]
    done = run(*short, *backends, f"--torch_python={TORCH_PYTHON}", f"--json={file}")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())
    check_row(row, "torchrun", 12)


@exhaustive
def test_elastic_loses_no_step_with_and_without_respawning(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    short = ["--fault_model=tiny", "--faults=kill", "--rounds=1", "--fault_step=12"]
    done = run(*short, "--backends=elastic", "--respawn=yes,no", f"--json={file}")
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [row["respawn"] for row in rows] == ["yes", "no"]
    for row in rows:
        check_row(row, "elastic", 0)
