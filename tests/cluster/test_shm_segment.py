"""Shared memory that a killed process has left is removed by the next that makes some."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tfdist.cluster.mesh import shm_segment
from tfdist.cluster.mesh.shm_segment import Segment

DIES = """
import os, signal
from tfdist.cluster.mesh.shm_segment import Segment
print(Segment(4096).name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shm_segment, "MEMORY", str(tmp_path))
    return tmp_path


def aged(path):
    """As if it had been there for an hour."""
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def test_what_a_killed_process_has_left():
    done = subprocess.run([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    left = os.path.join(shm_segment.MEMORY, done.stdout.strip())
    assert os.path.exists(left)
    Segment(4096).unlink()  # it could be another's that is not locked yet
    assert os.path.exists(left)
    aged(left)
    Segment(4096).unlink()
    assert not os.path.exists(left)


def test_what_is_in_use_stays(memory):
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
