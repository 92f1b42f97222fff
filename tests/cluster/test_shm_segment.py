"""Shared memory left by a killed process is removed when the next segment is created."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tfdist._src.cluster.mesh import shared_memory
from tfdist._src.cluster.mesh.shared_memory import Segment

DIES = """
import os, signal
from tfdist._src.cluster.mesh.shared_memory import Segment
print(Segment(4096).name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "MEMORY", str(tmp_path))
    return tmp_path


def aged(path):
    """Makes a file look an hour old."""
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def test_files_of_killed_processes_are_removed():
    done = subprocess.run([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    left = os.path.join(shared_memory.MEMORY, done.stdout.strip())
    assert os.path.exists(left)
    Segment(4096).unlink()  # a new file may not be locked yet
    assert os.path.exists(left)
    aged(left)
    Segment(4096).unlink()
    assert not os.path.exists(left)


def test_files_in_use_stay(memory):
    made = Segment(4096)
    aged(memory / made.name)
    Segment(4096).unlink()
    assert (memory / made.name).exists()
    made.unlink()
    made.descriptor.close()
    assert not list(memory.iterdir())


def test_other_files_stay(memory):
    (memory / "tfdist-mine").touch()
    (memory / f"tfdist-{'0' * 32}").mkdir()
    for path in memory.iterdir():
        aged(path)
    Segment(4096).unlink()
    assert len(list(memory.iterdir())) == 2
