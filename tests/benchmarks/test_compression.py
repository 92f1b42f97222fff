"""The benchmark of compression gives a row for each codec and rate, and says why one is missing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.flags import check_refused
from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


def command(*arguments: str) -> list[str]:
    """What runs the benchmark."""
    return [sys.executable, "-m", "benchmarks.compression", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark."""
    return subprocess.run(
        command(*arguments),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def namespaces(process: int) -> list[str]:
    """Those that a run of the benchmark has made."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.startswith(f"ar{process}")]


@pytest.fixture(scope="module")
def hosts() -> None:
    """Skips where no hosts can be made."""
    if os.geteuid() or not shutil.which("tc"):
        pytest.skip("takes root and iproute2")
    name = f"ar{os.getpid()}try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(done.stderr.strip())  # Root in a container may not make namespaces.
    subprocess.run(["ip", "netns", "del", name])


@pytest.fixture(scope="module")
def measured(
    hosts: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]]]:
    """The table and the rows of a short run."""
    file = tmp_path_factory.mktemp("rows") / "rows.json"
    short = ["--model=tiny", "--codecs=int8,none", "--rate=100mbit", "--steps=20", "--rounds=3"]
    done = run(*short, f"--json={file}")
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@exhaustive
def test_every_codec_has_a_row(measured: tuple[str, list[dict[str, Any]]]) -> None:
    _, rows = measured
    assert [(row["codec"], row["chosen"]) for row in rows] == [("int8", "int8"), ("none", "none")]
    for row in rows:
        assert (row["rate"], row["hosts"], row["model"]) == ("100mbit", 2, "tiny")
        assert 0 < row["best_ms"] <= row["step_ms"]
        assert row["steps"] == 3 + 3 * 20
        assert row["loss"] == row["losses"][-1]
        assert len(row["losses"]) == len(row["seconds"]) == 4
        assert row["seconds"] == sorted(row["seconds"])


@exhaustive
def test_every_codec_learns_the_same(measured: tuple[str, list[dict[str, Any]]]) -> None:
    int8, none = measured[1]
    assert none["loss"] < 0.8 * none["losses"][0]
    assert int8["losses"] == pytest.approx(none["losses"], rel=0.01)


@exhaustive
def test_bytes_and_speed_are_those_of_the_codec(
    measured: tuple[str, list[dict[str, Any]]],
) -> None:
    int8, none = measured[1]
    assert 64 * 128 * 4 < none["wire_bytes"] < 2 * 64 * 128 * 4
    assert 64 * 128 < int8["wire_bytes"] < none["wire_bytes"] / 2
    assert (none["encode_gbs"], none["decode_gbs"]) == (None, None)
    assert int8["encode_gbs"] > 0 and int8["decode_gbs"] > 0
    assert none["ratio"] == 1
    assert int8["ratio"] > 0


@exhaustive
def test_the_table_shows_the_rows(measured: tuple[str, list[dict[str, Any]]]) -> None:
    table, rows = measured
    for row in rows:
        assert f"{row['step_ms']:.2f}" in table
        assert f"{row['loss']:.4f}" in table


@exhaustive
@pytest.mark.usefixtures("hosts")
def test_ctrl_c_leaves_nothing_behind() -> None:
    process = subprocess.Popen(
        command("--model=tiny", "--codecs=none"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    assert "none: starting" in process.stderr.readline()
    assert len(namespaces(process.pid)) == 3
    time.sleep(0.5)  # in the middle of something
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    assert namespaces(process.pid) == []


def test_wrong_flags_are_refused_with_the_rule() -> None:
    check_refused(
        "compression",
        {
            "--hosts=1": "[2, 200]",
            "--rate=fast": "each is such as 100mbit or 1gbit, or none for no limit",
            "--rate=0mbit": "each is such as 100mbit",
            "--codecs=none,pigeons": "any of none, fp16, bf16",
            "--codecs=": "any of none, fp16, bf16",
            "--model=pigeons": "mlp|tiny",
            "--json=/no/folder/file": "its folder does not exist",
            "--plot=picture.txt": "ends in .png",
        },
    )


@exhaustive
def test_where_hosts_cannot_be_made_one_line_says_what_it_takes() -> None:
    done = subprocess.run(
        command("--codecs=none"),
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": "/no/folder"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert "take root and the commands ip and tc: apt-get install iproute2" in done.stderr


def test_a_codec_that_fails_is_reported_and_the_others_go_on() -> None:
    from benchmarks.compression.figures import format_table, make_row
    from benchmarks.compression.plan import Plan
    from benchmarks.compression.rounds import take_rounds
    from benchmarks.compression.speed import Speed
    from benchmarks.compression.turn import Turn
    from benchmarks.step_time.members import TeamError

    stopped = set()

    class Fake:
        def __init__(self, codec: str) -> None:
            self.codec = codec
            self.left = {"early": 0, "late": 3}.get(codec, 99)

        def steps(self, count: int) -> Turn:
            self.left -= 1
            if self.left < 0:
                raise TeamError("worker 1 ended with exit code 3: no luck")
            return Turn(0.1 * count, 10.0 * count, float("inf"), "topk")

        def stop(self) -> None:
            stopped.add(self.codec)

    seconds = []

    def plan(step: float) -> Plan:
        seconds.append(step)
        return Plan(steps=5, rounds=3)

    start: Any = Fake
    courses = take_rounds(start, ["early", "late", "auto"], plan, lambda line: None)
    assert stopped == {"early", "late", "auto"}
    assert seconds == pytest.approx([0.1])
    rows = [make_row(c, None, 5, Speed(), {"codec": name}) for name, c in courses.items()]
    assert [row.get("missing") for row in rows] == [
        "worker 1 ended with exit code 3: no luck",
        "worker 1 ended with exit code 3: no luck",
        None,
    ]
    assert (rows[2]["step_ms"], rows[2]["wire_bytes"]) == (pytest.approx(100), 10)
    assert (rows[2]["chosen"], rows[2]["steps"]) == ("topk", 18)
    assert (rows[2]["loss"], rows[2]["ratio"]) == (None, None)
    assert "missing: worker 1 ended with exit code 3: no luck" in format_table(rows)


def test_ratios_are_taken_round_by_round() -> None:
    from benchmarks.compression.figures import make_row
    from benchmarks.compression.rounds import Course
    from benchmarks.compression.speed import Speed
    from benchmarks.compression.turn import Turn

    def course(*seconds: float) -> Course:
        return Course(Turn(9, 9, 2.0, "x"), [Turn(s, 40, 1.0, "x") for s in seconds])

    row = make_row(course(0.1, 1.0, 0.1), course(0.2, 2.0, 0.1), 10, Speed(3.0, 4.0), {})
    assert row["ratio"] == pytest.approx(2)
    assert (row["step_ms"], row["best_ms"]) == pytest.approx((10, 10))
    assert (row["wire_bytes"], row["encode_gbs"], row["decode_gbs"]) == (4, 3.0, 4.0)
    assert row["seconds"] == pytest.approx([0, 0.1, 1.1, 1.2])
    assert row["losses"] == [2.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("seconds", "steps", "rounds"),
    [(0.001, 40, 10), (0.03, 40, 10), (0.3, 5, 12), (2.8, 2, 5), (60.0, 2, 5)],
)
def test_a_slow_link_gets_fewer_steps(seconds: float, steps: int, rounds: int) -> None:
    from benchmarks.compression.plan import Plan, make_plan

    assert make_plan(seconds, None, None) == Plan(steps, rounds)
    assert make_plan(seconds, 7, 3) == Plan(7, 3)


@exhaustive
def test_speeds_of_all_kinds_of_codecs() -> None:
    """Several in one process: each carried codec opens a communicator of the same name."""
    code = """
from benchmarks.compression.speed import measure_speed
from tfdist.compression import Int8, PowerSGD, RandomK, Threshold, TopK
print([measure_speed(codec) for codec in (Int8(), TopK(), Threshold(), RandomK(), PowerSGD())])
"""
    path = os.pathsep.join([str(FOLDER), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("encode_gbs=None") == 0
    assert done.stdout.count("decode_gbs=None") == 2  # of those that sum what they send


def test_every_group_has_the_reference() -> None:
    from benchmarks.compression.groups import fitting, make_groups

    assert make_groups(["a", "none", "b", "c"], 4) == [["none", "a", "b", "c"]]
    assert make_groups(["a", "none", "b", "c"], 3) == [["none", "a", "b"], ["none", "c"]]
    assert make_groups(["a", "b", "c"], 2) == [["a", "b"], ["c"]]
    assert make_groups(["none"], 2) == [["none"]]
    assert fitting(10**9) == 2


def test_a_worker_that_dies_says_its_last_words() -> None:
    from benchmarks.step_time.members import Members, TeamError

    code = "import sys; print('first'); print('no luck', file=sys.stderr); sys.exit(3)"
    members = Members([[sys.executable, "-u", "-c", code]], [{}], timeout=FAR)
    try:
        with pytest.raises(TeamError, match="worker 0 ended with exit code 3: first \\| no luck"):
            members.ask(1)
    finally:
        members.stop()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.compression.plot import plot

    rows = [
        {"codec": codec, "rate": rate, "chosen": "int8", "seconds": [0, 1], "losses": [2.0, loss]}
        for codec, loss in (("int8", 1.0), ("auto", None))
        for rate in ("1gbit", "none")
    ]
    plot([*rows, {"codec": "topk", "rate": "none", "missing": "why"}], str(tmp_path / "rows.png"))
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
