"""The benchmark of step time gives a row for each backend, and says why one is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.flags import check_refused
from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]
TORCH_PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)  # A Python that has torch.
DDP = {"ddp", "ddp_unconnected"}
JAX = {"jax", "jax_unconnected"}


def find_torch() -> bool:
    """Whether that Python has it."""
    find = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    try:
        return subprocess.run([TORCH_PYTHON, "-c", find]).returncode == 0
    except OSError:
        return False


has_torch = find_torch()
needs_torch = pytest.mark.skipif(not has_torch, reason="there is no torch; set TORCH_PYTHON")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the benchmark."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.step_time", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """The table and the rows of a short run of everything."""
    file = tmp_path_factory.mktemp("rows") / "rows.json"
    short = ["--models=tiny", "--starts=1", "--rounds=2", "--steps=2", f"--json={file}"]
    done = run(*short, f"--torch_python={TORCH_PYTHON}")
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@exhaustive
def test_every_backend_has_a_row(measured: tuple[str, list[dict[str, Any]]]) -> None:
    _, rows = measured
    assert {(row["workers"], row["backend"]) for row in rows} == {
        (1, "tfdist"),
        (1, "tfdist_xla"),
        (1, "keras"),
        (1, "keras_xla"),
        (2, "tfdist"),
        (2, "tfdist_xla"),
        (2, "tfdist_tensorflow"),
        (2, "tfdist_sharded"),
        (2, "tfdist_replica_statistics"),
        (2, "tfdist_loop"),
        (2, "stock"),
        (2, "unconnected"),
        (2, "unconnected_xla"),
        *((workers, backend) for workers in (1, 2) for backend in (*DDP, *JAX)),
    }
    others = (*DDP, *JAX)
    assert [row for row in rows if "missing" in row and row["backend"] not in others] == []
    for row in rows:
        if "missing" not in row:
            assert 0 < row["best_ms"] <= row["low_ms"] <= row["step_ms"] <= row["high_ms"]


@exhaustive
def test_tfdist_is_compared_with_its_peer_and_its_limit(
    measured: tuple[str, list[dict[str, Any]]],
) -> None:
    _, rows = measured
    ours = [row for row in rows if row["backend"] == "tfdist"]
    assert [row["peer"] for row in ours] == ["keras", "stock"]
    assert [row["limit"] for row in ours] == ["keras", "unconnected"]
    assert all(0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in ours)
    assert all(
        0 < row["efficiency_low"] <= row["efficiency"] <= row["efficiency_high"] for row in ours
    )


@exhaustive
def test_sharing_out_is_compared_with_doing_without(
    measured: tuple[str, list[dict[str, Any]]],
) -> None:
    _, rows = measured
    assert [row["peer"] for row in rows if row["backend"] == "tfdist_sharded"] == ["tfdist"]


@exhaustive
@needs_torch
def test_ddp_is_compared_with_its_own_limit(
    measured: tuple[str, list[dict[str, Any]]],
) -> None:
    _, rows = measured
    assert [row["limit"] for row in rows if row["backend"] == "ddp"] == ["ddp_unconnected"] * 2
    assert not any("peer" in row for row in rows if row["backend"] in DDP)


@exhaustive
def test_the_table_shows_the_rows(measured: tuple[str, list[dict[str, Any]]]) -> None:
    table, rows = measured
    for row in rows:
        assert row.get("missing") or f"{row['step_ms']:.2f}" in table


def test_without_torch_ddp_is_reported_with_what_installs_it() -> None:
    short = ["--workers=2", "--models=tiny", "--backends=ddp", "--starts=1", "--rounds=2"]
    done = run(*short, "--torch_python=/no/python")
    assert done.returncode == 0, done.stderr
    assert "missing: /no/python does not run" in done.stdout
    assert "pip install torch==" in done.stdout


def test_wrong_flags_are_refused_with_the_rule() -> None:
    check_refused(
        "step_time",
        {
            "--workers=0": "a number from 1",
            "--models=pigeons": "any of tiny, mlp, cnn, resnet, gpt, lstm",
            "--backends=pigeons": "any of tfdist, tfdist_loop",
        },
    )


def test_ratios_are_taken_round_by_round() -> None:
    from benchmarks.step_time.figures import make_rows

    times = {"tfdist": [0.02, 0.2, 0.02], "stock": [0.01, 0.1, 0.02], "alone": [0.01, 0.05, 0.01]}
    limits = dict.fromkeys(times, "alone")
    ours, stock, alone = make_rows("mlp", 2, times, {}, limits, dict.fromkeys(times, "stock"))
    assert (ours["step_ms"], ours["best_ms"]) == pytest.approx((20, 20))
    assert (ours["low_ms"], ours["high_ms"]) == pytest.approx((20, 110))
    assert ours["ratio"] == pytest.approx(2)
    assert ours["efficiency"] == pytest.approx(0.5)
    assert ours["efficiency_low"] == pytest.approx(0.375)
    assert stock["efficiency"] == pytest.approx(0.5)
    assert "ratio" not in stock
    assert "efficiency" not in alone


def test_missing_backend_is_shown_with_its_reason() -> None:
    from benchmarks.step_time.figures import format_table, make_rows

    missing = {"stock": "worker 0: no"}
    names = {"tfdist": "stock", "stock": "stock"}
    rows = make_rows("mlp", 2, {"tfdist": [0.1, 0.1]}, missing, names, names)
    assert rows[1] == {"backend": "stock", "model": "mlp", "workers": 2, "missing": "worker 0: no"}
    assert "missing: worker 0: no" in format_table(rows)
    assert not {"ratio", "efficiency"} & set(rows[0])


@exhaustive
def test_a_worker_that_fails_is_named() -> None:
    from benchmarks.step_time.team import Team, TeamError

    team = Team("keras", "no such model", 1)
    try:
        with pytest.raises(TeamError, match="worker 0: KeyError: 'no such model'"):
            team.steps(1)
    finally:
        team.stop()


def test_a_worker_that_dies_is_heard_while_another_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.step_time.team import Team, TeamError

    script = tmp_path / "python"
    script.write_text(
        '#!/bin/sh\ncase "$3" in *\'"rank": 1\'*) echo no luck >&2; exit 3;; esac\n'
        "exec sleep 3600\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr("benchmarks.step_time.team.find_python", lambda *_: str(script))
    team = Team("unconnected", "tiny", 2)
    try:
        with pytest.raises(TeamError, match="worker 1 ended with exit code 3: no luck"):
            team.steps(1)
    finally:
        team.stop()


@needs_torch
def test_both_frameworks_train_models_of_one_size() -> None:
    import numpy as np

    from benchmarks.all_reduce.python import ENVIRONMENT
    from benchmarks.step_time import keras_models

    count = (
        "import json; from benchmarks.step_time.torch_models import BUILDERS; "
        "print(json.dumps({n: sum(p.numel() for p in b().parameters()) "
        "for n, b in BUILDERS.items()}))"
    )
    env = {**os.environ, **ENVIRONMENT}
    done = subprocess.run([TORCH_PYTHON, "-c", count], env=env, capture_output=True, check=True)
    assert json.loads(done.stdout) == {
        name: sum(int(np.prod(v.shape)) for v in build().trainable_variables)
        for name, build in keras_models.BUILDERS.items()
    }
