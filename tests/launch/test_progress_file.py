"""What workers tell their launcher in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.launch.job.failure import Doubt, worker_failure
from tfdist._src.launch.job.worker import ProgressMemory
from tfdist._src.monitoring.training import Record
from tfdist._src.options import InternalVariable
from tfdist._src.progress_file import SIZE, Progress, ProgressFile, UncaughtException
from tfdist.errors import ClusterError


def test_nothing_is_written():
    assert ProgressMemory().take() == Progress()


def test_steps_are_absolute():
    memory = ProgressMemory()
    file = ProgressFile(memory.path)
    record = Record(lambda: file)
    record.add(2, 8, 8)
    record.resumed_at(100)
    record.add(1, 4, 4)
    record.add(3, 4, 4)
    assert record.read().steps == 6
    assert memory.take() == Progress(104)


@exhaustive
def test_the_step_at_which_it_resumed_counts_before_the_next_one():
    memory = ProgressMemory()
    file = ProgressFile(memory.path)
    Record(lambda: file).resumed_at(100)
    assert memory.take() == Progress(100)


@exhaustive
def test_a_record_without_a_launcher():
    record = Record(lambda: None)
    record.resumed_at(3)
    record.add(1, 1, 1)
    assert record.read().steps == 1


def raised(error):
    memory = ProgressMemory()
    ProgressFile(memory.path).ended_by(error)
    return memory.take().raised


def test_an_exception_is_described_by_classes_and_first_line():
    assert raised(ClusterError("wrong\nin detail")) == UncaughtException(
        ("ClusterError", "TfdistError", "ValueError"), (), "wrong"
    )
    assert raised(KeyboardInterrupt()) == UncaughtException(("KeyboardInterrupt",))
    assert str(raised(ClusterError("wrong"))) == "ClusterError: wrong"


def test_chained_exceptions():
    try:
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise OSError("between") from error
    except OSError:
        try:
            raise ValueError("last")
        except ValueError as error:
            assert raised(error).chained == ("OSError", "KeyError")
            error.__suppress_context__ = True
            assert raised(error).chained == ()


@exhaustive
def test_a_very_long_exception_fits():
    kind = type("E" * 5000, (ValueError,), {})
    found = raised(kind("\u1234" * 5000))
    assert found.classes[0] == "E" * 80
    assert set(found.message) == {"\u1234"}


def test_damaged_memory_tells_no_exception():
    list_of_lists = bytes(16) + b"\x02" + bytes(7) + b"[]" * 2036
    for data in (b"", b"short", b"\xff" * SIZE, b"\1" * SIZE, list_of_lists):
        assert Progress.from_bytes(data).raised is None


def test_the_memory_belongs_to_one_process():
    memory = ProgressMemory()
    ProgressFile(memory.path).count(3)
    code = f"from tfdist._src.progress_file import ProgressFile; ProgressFile({memory.path!r})"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert f"belongs to process {os.getpid()}" in other.stderr
    assert memory.take() == Progress(3)


@exhaustive
def test_a_file_that_is_no_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    with pytest.raises(OSError, match="not the memory of a launcher"):
        ProgressFile(str(path))
    assert path.read_bytes() == b"mine"


PROGRAM = """
import os
from tfdist._src.cluster.session.exit_reason import watch_for_launcher
from tfdist._src.monitoring.training import record
watch_for_launcher()
record.add(5, 1, 1)
if os.fork() == 0:
    record.add(5, 1, 1)
    raise KeyError("in a forked process")
os.wait()
raise OSError("no paper")
"""


@exhaustive
def test_a_process_tells_by_itself():
    memory = ProgressMemory()
    environment = {**os.environ, InternalVariable.PROGRESS_FILE: memory.path}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stderr.endswith("OSError: no paper\n")
    assert memory.take() == Progress(5, UncaughtException(("OSError",), (), "no paper"))


@exhaustive
@pytest.mark.parametrize("path", ["/nowhere/at/all", ""])
def test_a_memory_that_cannot_be_opened_changes_nothing(path):
    environment = {**os.environ, InternalVariable.PROGRESS_FILE: path}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stderr.endswith("OSError: no paper\n")


def test_the_chief_tells_what_its_output_would():
    for error, doubt in [
        (UncaughtException(("ValueError",)), Doubt.NONE),
        (UncaughtException(("PeerLostError",)), Doubt.VICTIM),
        (UncaughtException(("ValueError",), ("UnavailableError",)), Doubt.VICTIM),
        (None, Doubt.UNSEEN),
    ]:
        progress = Progress(3, error)
        failure = worker_failure(host=0, rank=0, status=1, tail=(), log="", progress=progress)
        assert failure.doubt == doubt, error
