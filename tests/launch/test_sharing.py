"""How cores and GPUs are divided among the workers of a host: tables."""

from __future__ import annotations

import pytest

from tfdist._src.launch.job.resources import (
    available_cores,
    cgroup_quota,
    gpu_settings,
    thread_settings,
    visible_gpus,
)
from tfdist.errors import LaunchError


@pytest.mark.parametrize(
    ("cores", "workers", "asked", "threads"),
    [
        (8, 4, None, (2, 2, 2)),
        (16, 2, None, (8, 8, 8)),
        (4, 4, None, (1, 1, 2)),
        (2, 4, None, (1, 1, 2)),
        (4, 1, None, (4, 4, 4)),
        (8, 2, 3, (3, 3, 3)),
        (8, 2, 1, (1, 1, 2)),
    ],
)
def test_cores_are_divided_among_workers(cores, workers, asked, threads):
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    wanted = dict(zip(names, map(str, threads), strict=True))
    assert thread_settings(cores, workers, asked, {}) == wanted


def test_threads_that_the_user_has_set_stay():
    settings = thread_settings(8, 2, None, {"OMP_NUM_THREADS": "7"})
    assert settings == {"TF_NUM_INTRAOP_THREADS": "4", "TF_NUM_INTEROP_THREADS": "4"}
    assert thread_settings(8, 2, 2, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "2"


def test_zero_cores_leave_threads_alone():
    assert thread_settings(8, 2, 0, {}) == {}


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a\n", {"a/cpu.max": "400000 100000", "cpu.max": "300000 100000"}, 3.0),
        (
            "4:cpu,cpuacct:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"},
            2.0,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)
def test_quota_of_a_container(own, files, quota, tmp_path):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert cgroup_quota(tmp_path / "root", tmp_path / "own") == quota


def test_no_cgroups_at_all(tmp_path):
    assert cgroup_quota(tmp_path, tmp_path / "missing") is None
    assert available_cores() >= 1


@pytest.mark.parametrize(
    ("listed", "gpus"),
    [
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("2, 5", ["2", "5"]),
        ("1,-1,2", ["1"]),
        ("GPU-ab,MIG-cd", ["GPU-ab", "MIG-cd"]),
    ],
)
def test_gpus_that_are_listed(listed, gpus):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == gpus


def test_gpus_that_are_counted(tmp_path):
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]


@pytest.mark.parametrize(
    ("gpus", "workers", "asked", "slices", "note"),
    [
        ("", 2, None, [None, None], ""),
        ("0", 1, None, [None], ""),
        ("0 1", 1, None, [None], ""),
        ("0 1", 2, None, ["0", "1"], ""),
        ("4 5 6 7", 2, None, ["4,5", "6,7"], ""),
        ("0 1 2", 2, None, ["0", "1"], "1 GPU of 3 left unused"),
        ("0", 2, None, ["", ""], "1 GPU for 2 workers: all workers use the CPU"),
        ("0 1 2 3", 2, 1, ["0", "1"], ""),
        ("0 1", 2, 0, ["", ""], ""),
        ("", 2, 0, ["", ""], ""),
    ],
)
def test_slices_of_gpus(gpus, workers, asked, slices, note):
    settings, said = gpu_settings(gpus.split(), workers, asked)
    assert [setting.get("CUDA_VISIBLE_DEVICES") for setting in settings] == slices
    assert said.startswith(note) and bool(said) == bool(note)


def test_more_gpus_than_there_are():
    with pytest.raises(LaunchError, match=r"needs 4 GPUs\. Received: a host with 3 visible"):
        gpu_settings(["0", "1", "2"], 2, 2)
