"""Workers without a shared disk, or with a path each, read what they have saved."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive, some
from tfdist._src.launch.job.ports import Reservation

# How each worker gets to a folder of its own.
_PLACES = ["other disks", "other folders", "working folders"]
# Runs a command where "$0" is an empty disk of its own.
_MOUNT = 'mount -t tmpfs tmpfs "$0" && exec "$@"'


def _run(kind, place, folder, workers, **settings):
    """What each worker has read."""
    (shared := folder / "shared").mkdir(parents=True)
    processes = []
    with Reservation(workers) as reservation:
        addresses = [f"127.0.0.1:{port}" for port in reservation.ports]
        for rank in range(workers):
            own = folder / str(rank)
            own.mkdir()
            at = {"other folders": str(own), "working folders": "models"}.get(place, str(shared))
            command = [sys.executable, "-m", f"{__package__}.saving_apart", kind, at]
            if place == "other disks" and rank:
                command = ["unshare", "-m", "sh", "-c", _MOUNT, at, *command]
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            environment = {
                **os.environ,
                "PYTHONPATH": os.getcwd(),
                "TF_CONFIG": json.dumps(task),
                "RESULT": str(folder / f"{rank}.npz"),
                **settings,
            }
            with open(folder / f"{rank}.log", "w") as log:
                processes.append(subprocess.Popen(command, cwd=own, env=environment, stderr=log))
        try:
            codes = [process.wait(timeout=FAR) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            assert code == 0, (folder / f"{rank}.log").read_text()
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(workers)]


@pytest.mark.parametrize("place", some(_PLACES, always=[]))
@pytest.mark.parametrize("kind", some(["replicated", "sharded"], always=[]))
def test_every_worker_reads_what_it_has_saved(kind, place, tmp_path):
    if place == "other disks":
        _check_may_mount(tmp_path)
    check_read_as_alone(tmp_path, kind, place)


@exhaustive
@pytest.mark.parametrize("place", ["other folders", "one folder"])
def test_a_worker_saves_after_the_chief_has_left(place, tmp_path):
    check_read_as_alone(tmp_path, "late", place)


@exhaustive
def test_the_chief_alone_writes_into_one_folder(tmp_path):
    check_read_as_alone(tmp_path, "together", "one folder")


def check_read_as_alone(folder, kind, place):
    (expected,) = _run("replicated", "", folder / "one", 1)
    for read in _run(kind, place, folder / "two", 2):
        assert kind == "late" or read.keys() == expected.keys()
        for name, value in read.items():
            # Without the trainings between the saves, all have the first file's values.
            first = expected["model 0"] if kind == "late" else expected[name]
            np.testing.assert_allclose(value, first, atol=1e-5, err_msg=name)


@exhaustive
def test_only_the_chief_writes_if_it_is_told_to(tmp_path):
    _check_may_mount(tmp_path)
    with pytest.raises(AssertionError, match=r"a\.keras"):
        _run("replicated", "other disks", tmp_path / "two", 2, TFDIST_SAVE="chief")


def _check_may_mount(folder):
    probe = ["unshare", "-m", "sh", "-c", _MOUNT, str(folder), "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("mounting a disk for one process takes root")
