"""The benchmark of GPUs comes to its end, with all figures, on a driver of threads."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.flags import check_refused
from tests.harness import gpus
from tests.harness.tiers import exhaustive

ROOT = Path(__file__).parents[2]
SIZES = [1024, 8192]
WAYS = ["p2p", "nccl", "host"]
OF_NCCL = ["all-reduce", "reduce-scatter", "all-gather", "broadcast", "send and receive"]
# It is compiled anew, and so are the kernels.
pytestmark = [exhaustive, pytest.mark.timeout(1800)]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        env={**os.environ, **gpus.variables(0, ""), "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The table, and the file, of a short run with three GPUs."""
    file = tmp_path_factory.mktemp("figures") / "figures.json"
    sizes = ",".join(map(str, SIZES))
    done = run("--gpus=3", "--rounds=2", f"--sizes={sizes}", f"--json={file}")
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_every_figure_is_there(measured: tuple[str, dict[str, Any]]) -> None:
    table, found = measured
    figures = found["figures"]

    def of(name: str, *members: str) -> list[tuple[Any, ...]]:
        return [tuple(f[m] for m in members) for f in figures if f["figure"] == name]

    assert found["missing"] == []
    assert of("copy", "reader", "owner") == list(itertools.permutations(range(3), 2))
    both = of("copies both ways", "reader", "owner")
    assert both == list(itertools.combinations(range(3), 2))
    assert of("all-reduce", "bytes", "way") == list(itertools.product(SIZES, WAYS))
    for name in OF_NCCL:  # Whole vectors of 16 bytes for each rank.
        assert of(f"{name} of NCCL", "bytes") == [(1008,), (8160,)]
    beside = {("nothing",), *((way,) for way in WAYS)}
    assert set(of("product", "beside")) == beside
    assert all(len(f["rounds"]) == 2 and f["seconds"] > 0 for f in figures)
    for figure in figures:
        assert f"{figure['seconds'] * 1e6:.1f}" in table


def test_the_gpu_is_what_its_driver_says_and_what_others_say_is_theirs(
    measured: tuple[str, dict[str, Any]],
) -> None:
    table, found = measured
    assert found["gpus"] == ["A GPU of threads"] * 3
    assert table.startswith("3 GPUs, A GPU of threads, driver for CUDA 12.4, NCCL 2.21.5, kernels")
    own, others = table.split("\nPublished by others, on other machines, not measured here:\n")
    for each in found["published"]:
        assert each["source"] in others and each["value"] not in own


def test_bandwidths_are_those_of_nccl_tests(measured: tuple[str, dict[str, Any]]) -> None:
    from benchmarks.gpu.bandwidth import bus_bandwidth

    # https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    for name, share in (
        ("all-reduce", 2 * 7 / 8),
        ("all-reduce of NCCL", 2 * 7 / 8),
        ("reduce-scatter of NCCL", 7 / 8),
        ("all-gather of NCCL", 7 / 8),
        ("broadcast of NCCL", 1),
        ("send and receive of NCCL", 1),
    ):
        assert bus_bandwidth(name, 1000, 0.5, 8) == pytest.approx(2000 * share), name
    for figure in measured[1]["figures"]:
        if figure["figure"] == "copies both ways":
            rate = 2 * figure["bytes"] / figure["seconds"]
            assert figure["algorithm_bandwidth"] == pytest.approx(rate)
        elif figure["figure"] == "all-reduce":
            expected = figure["algorithm_bandwidth"] * 4 / 3
            assert figure["bus_bandwidth"] == pytest.approx(expected)


def test_what_cannot_be_had_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.gpu import several

    lines = [
        {"missing": "p2p", "why": "two ranks have the same GPU"},
        {"figure": "all-reduce", "way": "host", "bytes": 1000, "seconds": [0.4, 0.1, 0.2]},
    ]
    missing, figure = several._shown(4, map(json.dumps, lines))
    assert missing == lines[0]
    assert (figure["seconds"], figure["rounds"]) == (0.2, [0.4, 0.1, 0.2])
    assert "p2p: missing: two ranks have the same GPU\n" in capsys.readouterr().out


@pytest.fixture(scope="module")
def measured_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The table, and the file, of what one GPU of threads does soon enough."""
    file = tmp_path_factory.mktemp("figures") / "figures.json"
    parts = [f"--part={part}" for part in ("staged", "messages", "waiting", "one_bit")]
    done = run("--rounds=2", "--mib=1", f"--json={file}", *parts)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_figures_of_one_gpu_are_compared(measured_alone: tuple[str, dict[str, Any]]) -> None:
    table, found = measured_alone
    assert table.startswith("A GPU of threads, driver 12040, kernels by NVRTC ")
    assert [each["missing"] for each in found["missing"]] == ["one bit by torch"]
    figures = {figure["figure"]: figure for figure in found["figures"]}
    besides = {name: figure["beside"] for name, figure in figures.items() if "ratio" in figure}
    assert besides == {
        "through the host and back": "pinned copy to the host",
        "message between two stages": "copy beside messages",
        "product beside a waiting one shot": "product",
        "product beside waiting two shots": "product",
    }
    for name, beside in besides.items():
        slower = figures[name]["seconds"] / figures[beside]["seconds"]
        more = (figures[name]["bytes"] or 1) / (figures[beside]["bytes"] or 1)
        assert figures[name]["ratio"] == pytest.approx(more / slower)
        assert f"{figures[name]['ratio']:.2f} of {beside}\n" in table


def test_one_bit_by_torch() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.gpu import onebit

    values, error = torch.randn(800), torch.randn(800)
    corrected = values + error
    scale, packed = onebit.encode(torch, values, error)
    assert packed.numpy().tolist() == np.packbits(corrected.numpy() >= 0).tolist()
    decoded = onebit.decode(torch, scale, packed)
    expected = torch.where(corrected >= 0, 1.0, -1.0) * corrected.square().mean().sqrt()
    torch.testing.assert_close(decoded, expected)
    torch.testing.assert_close(error, corrected - decoded)
    names = [figure["figure"] for figure in onebit.measure(1, 1 << 10, "cpu")]
    assert names == [
        "copy by torch",
        "encode by torch, packed by torch",
        "decode by torch, unpacked by torch",
    ]


def test_too_few_gpus_are_refused() -> None:
    done = run("--gpus=3", FAKE_CUDA_DEVICES="2")
    assert done.returncode == 1
    assert done.stderr == (
        "--gpus=3 needs as many GPUs. Received: a host with 2 visible. Lower it, or correct "
        "CUDA_VISIBLE_DEVICES.\n"
    )


def test_wrong_flags_are_refused_with_the_rule() -> None:
    check_refused(
        "gpu",
        {
            "--gpus=0": "1",
            "--rounds=0": "positive",
            "--mib=0": "positive",
            "--sizes=7": "divisible",
        },
    )
