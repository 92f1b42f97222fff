"""The benchmark of step time gives a row for each backend, and says why one is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The table and the rows of a short run."""
    file = tmp_path_factory.mktemp("rows") / "rows.json"
    short = ["--models=tiny", "--starts=1", "--rounds=2", "--steps=2", f"--json={file}"]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "step_time.py"), *short],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_every_backend_has_a_row(measured: tuple[str, list[dict[str, Any]]]) -> None:
    _, rows = measured
    assert {(row["workers"], row["backend"]) for row in rows} == {
        (1, "tfdist"),
        (1, "keras"),
        (2, "tfdist"),
        (2, "stock"),
        (2, "unconnected"),
    }
    assert [row for row in rows if "missing" in row] == []
    assert all(0 < row["best_ms"] <= row["step_ms"] for row in rows)


def test_tfdist_is_compared_with_its_peer(
    measured: tuple[str, list[dict[str, Any]]],
) -> None:
    _, rows = measured
    ours = [row for row in rows if row["backend"] == "tfdist"]
    assert [row["peer"] for row in ours] == ["keras", "stock"]
    assert all(0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in ours)


def test_the_table_shows_the_rows(measured: tuple[str, list[dict[str, Any]]]) -> None:
    table, rows = measured
    for row in rows:
        assert f"{row['step_ms']:.2f}" in table


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the benchmark's modules importable."""
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.usefixtures("parts")
def test_ratio_is_taken_round_by_round() -> None:
    from stepping.figures import make_rows

    times = {"tfdist": [0.02, 0.2, 0.02], "stock": [0.01, 0.1, 0.02]}
    ours, stock = make_rows("mlp", 2, times, {}, "stock")
    assert ours["ratio"] == pytest.approx(2)
    assert (ours["step_ms"], ours["best_ms"]) == pytest.approx((20, 20))
    assert "ratio" not in stock


@pytest.mark.usefixtures("parts")
def test_missing_backend_is_shown_with_its_reason() -> None:
    from stepping.figures import format_table, make_rows

    rows = make_rows("mlp", 2, {"tfdist": [0.1, 0.1]}, {"stock": "worker 0: no"}, "stock")
    assert rows[1] == {"backend": "stock", "model": "mlp", "workers": 2, "missing": "worker 0: no"}
    assert "missing: worker 0: no" in format_table(rows)
    assert "ratio" not in rows[0]


@pytest.mark.usefixtures("parts")
def test_a_worker_that_fails_is_named() -> None:
    from stepping.team import Team, TeamError

    team = Team("no such backend", "tiny", 1)
    try:
        with pytest.raises(TeamError, match="worker 0: KeyError: 'no such backend'"):
            team.steps(1)
    finally:
        team.stop()
