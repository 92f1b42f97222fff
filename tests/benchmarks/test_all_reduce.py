"""The benchmark of all-reduce gives rows that are checked, and says what is missing and why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]

needs_compiler = pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("g++")), reason="there is no C compiler"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.all_reduce", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(
    scope="module",
    params=[("native", "memcpy"), pytest.param(("native", "tf_ring", "memcpy"), marks=exhaustive)],
)
def backends(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """What is measured, beside what is missing."""
    return request.param


@pytest.fixture(scope="module")
def measured(
    backends: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]]]:
    """The table and the rows of a short run, in which there is no torch."""
    file = tmp_path_factory.mktemp("rows") / "rows.json"
    short = ["--ranks=2", "--sizes=1000,64KiB", "--rounds=2", f"--json={file}"]
    done = run(*short, f"--backends=gloo,{','.join(backends)}", "--torch_python=/no/python")
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@needs_compiler
def test_every_backend_has_a_row_for_each_size(
    backends: tuple[str, ...], measured: tuple[str, list[dict[str, Any]]]
) -> None:
    _, rows = measured
    assert [(row["backend"], row["bytes"]) for row in rows if "missing" not in row] == [
        (backend, size) for size in (1000, 65536) for backend in backends
    ]
    for row in rows[:-1]:
        assert row["ranks"] == 2
        assert row["wrong"] == 0
        assert row["busbw_gbps"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["best_gbps"] >= row["busbw_gbps"]


@needs_compiler
def test_what_is_missing_is_reported_with_what_installs_it(
    measured: tuple[str, list[dict[str, Any]]],
) -> None:
    table, rows = measured
    (missing,) = (row for row in rows if "missing" in row)
    assert (missing["backend"], missing["ranks"]) == ("gloo", 2)
    assert "pip install torch" in missing["missing"]
    assert f"gloo is missing: {missing['missing']}" in table


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("--backends=pigeons", "any of native, native_op, gloo"),
        ("--ranks=1", "a number from 2"),
        ("--sizes=4MB", "Write for example 64MiB"),
        ("--hosts=six", "netns:N"),
    ],
)
def test_a_wrong_flag_is_refused_with_the_rule(argument: str, rule: str) -> None:
    done = run(argument)
    assert done.returncode != 0
    assert rule in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "size", "shown"),
    [
        ("4", 4, "4 B"),
        ("1000", 1000, "1000 B"),
        ("1KiB", 1024, "1 KiB"),
        ("64 MiB", 64 << 20, "64 MiB"),
        ("1536KiB", 1536 << 10, "1536 KiB"),
        ("1GiB", 1 << 30, "1 GiB"),
    ],
)
def test_sizes_are_parsed_and_formatted(text: str, size: int, shown: str) -> None:
    from benchmarks.all_reduce.sizes import format_size, parse_size

    assert parse_size(text) == size
    assert format_size(size) == shown


@pytest.mark.parametrize("text", ["", "KiB", "-4", "1.5MiB", "1KB", "0", "6"])
def test_what_is_no_size_is_refused(text: str) -> None:
    from benchmarks.all_reduce.sizes import parse_size

    with pytest.raises(ValueError, match="Received"):
        parse_size(text)


def test_figures_are_those_of_nccl_tests() -> None:
    from benchmarks.all_reduce.figures import format_table, make_rows
    from benchmarks.all_reduce.rounds import Times

    times = {
        "gloo": Times([0.2, 2.0, 0.1]),
        "native": Times([0.1, 1.0, 0.1], wrong=3),
        "memcpy": Times([0.1, 0.1, 0.1]),
    }
    rows = make_rows(4, 10**9, times, cores_ns=50.0)
    gloo, native, memcpy = rows
    assert gloo["seconds"] == 0.2
    assert gloo["busbw_gbps"] == pytest.approx(1.5 / 0.2)
    assert gloo["best_gbps"] == pytest.approx(1.5 / 0.1)
    assert gloo["ratio"] == pytest.approx(0.5)  # Round by round.
    assert (native["ratio"], native["wrong"]) == (1, 3)
    assert memcpy["busbw_gbps"] == pytest.approx(10)
    assert memcpy["ratio"] == pytest.approx(10 / 15)
    table = format_table([*rows, {"backend": "mpi", "ranks": 4, "missing": "why"}])
    assert "7.5" in table
    assert "mpi is missing: why" in table


def test_a_team_that_fails_is_dropped_and_the_others_go_on() -> None:
    from benchmarks.all_reduce.rounds import take_rounds
    from benchmarks.all_reduce.team import TeamError

    class Fake:
        def __init__(self, lifetime: int) -> None:
            self.left = lifetime

        def measure(self, size: int, repetitions: int) -> tuple[float, int]:
            self.left -= 1
            if self.left < 0:
                raise TeamError("rank 1: it ended")
            return 0.02, 1

    dropped: dict[str, str] = {}
    teams: dict[str, Any] = {"early": Fake(0), "late": Fake(2), "never": Fake(99)}
    times = take_rounds(teams, 4, 3, dropped.__setitem__)
    assert dropped == {"early": "rank 1: it ended", "late": "rank 1: it ended"}
    assert list(times) == ["never"]
    assert (times["never"].seconds, times["never"].wrong) == ([0.02] * 3, 3)


@needs_compiler
def test_wrong_elements_are_counted(tmp_path: Path) -> None:
    from benchmarks.all_reduce.compiling import RANKS, build
    from benchmarks.all_reduce.hosts import HERE
    from benchmarks.all_reduce.job import Job
    from benchmarks.all_reduce.team import Team

    source = tmp_path / "forgetful.c"
    source.write_text(
        '#include "rank.h"\n'
        "const char* forget(const float* in, float* out, size_t n) {\n"
        "  for (size_t i = 0; i + 2 < n; i++) out[i] = 3 * in[i];\n"  # Not the last two.
        "  return 0;\n"
        "}\n"
        "int main(int argc, char** argv) {\n"
        "  rank_program program = {0, argc > 1 ? 3 : 0, 1, forget};\n"
        "  rank_serve(argv[1], &program);\n"
        "}\n"
    )
    program = build("gcc", [source], tmp_path / "forgetful", f"-I{RANKS}")
    job = Job(1, HERE, tmp_path / "control", tmp_path, tmp_path, sys.executable)
    team = Team(job, job.each_rank(str(program)), timeout=FAR)
    try:
        team.gather()
        assert team.measure(1000, 3)[1] == 2
    finally:
        team.stop()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no luck')", "exit code 1: no luck"),
        (
            "from benchmarks.all_reduce.ranks.rank import *; "
            "serve(read_arguments(), lambda n: n / 0, float)",
            "rank 0: ZeroDivisionError: division by zero",
        ),
        (
            "import os; from benchmarks.all_reduce.ranks.rank import *; "
            "serve(read_arguments(), lambda n: os._exit(3), float)",
            "rank 0: it ended",
        ),
    ],
)
def test_a_rank_that_fails_says_why(tmp_path: Path, code: str, message: str) -> None:
    from benchmarks.all_reduce.hosts import HERE
    from benchmarks.all_reduce.job import Job
    from benchmarks.all_reduce.python import ENVIRONMENT
    from benchmarks.all_reduce.team import Team, TeamError

    job = Job(2, HERE, tmp_path / "control", tmp_path, tmp_path, sys.executable)
    team = Team(job, job.each_rank(sys.executable, "-c", code, env=ENVIRONMENT), timeout=FAR)
    try:
        with pytest.raises(TeamError, match=message):
            team.gather()
            team.measure(4, 1)
    finally:
        team.stop()


def test_ranks_are_spread_over_hosts_in_order(tmp_path: Path) -> None:
    from benchmarks.all_reduce.hosts import Hosts
    from benchmarks.all_reduce.job import Job

    hosts = Hosts(["10.0.0.1", "10.0.0.2", "10.0.0.3"], "eth0", ["a", "b", "c"])
    job = Job(5, hosts, tmp_path / "control", tmp_path, tmp_path, sys.executable)
    assert job.host_of_rank == [0, 0, 1, 1, 2]
    assert [address.split(":")[0] for address in job.addresses()] == [
        "10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3",
    ]  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="takes root and iproute2")
def test_hosts_are_removed_whatever_happens() -> None:
    from benchmarks.all_reduce.hosts import make_hosts

    def listed() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout

    try:
        with make_hosts(2, "1gbit") as hosts:
            assert all(name in listed() for name in hosts.namespaces)
            command = [*hosts.prefix(1), "hostname"]
            name = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            assert name == hosts.namespaces[1]
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        pytest.skip(str(error))  # Root in a container may not make namespaces.
    assert f"ar{os.getpid()}" not in listed()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.all_reduce.plot import plot

    rows = [
        {"backend": backend, "ranks": 2, "bytes": size, "seconds": 1e-3, "busbw_gbps": 1.0}
        for backend in ("native", "memcpy")
        for size in (1024, 1 << 20)
    ]
    plot([*rows, {"backend": "gloo", "ranks": 2, "missing": "why"}], str(tmp_path / "rows.png"))
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
