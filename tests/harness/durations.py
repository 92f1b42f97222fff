"""Records and predicts the durations of tests."""

from __future__ import annotations

import collections
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

# The assumed duration, in seconds, of a test without a recorded duration.
UNKNOWN_SECONDS = 2.0
RECORDED = pathlib.Path(__file__).with_name("durations.json")
# The CPU seconds that the reference machine takes to import TensorFlow. On two of its cores, the
# default tests take 6:42.
_IMPORT_SECONDS = 4.6


class Recorder:
    """A plugin of pytest that records the mean duration of the cases of each test function.

    Durations are converted to seconds of a reference machine, so that any machine can record them.

    Args:
        file: the file to write. Its entries for test functions that do not run are kept.
        speed: the factor that converts seconds of this machine to seconds of the reference machine;
            by default, the recorder measures it at the end.
    """

    def __init__(self, file: pathlib.Path, speed: float | None = None) -> None:
        self._file, self._speed = file, speed
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._cases: dict[str, set[str]] = collections.defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = function_of(report.nodeid)
        self._seconds[name] += report.duration
        self._cases[name].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        before = json.loads(self._file.read_text()) if self._file.exists() else {}
        speed = _IMPORT_SECONDS / _import() if self._speed is None else self._speed
        means = {
            name: round(seconds * speed / len(self._cases[name]), 2)
            for name, seconds in self._seconds.items()
        }
        text = json.dumps({**before, **means}, indent=0, sort_keys=True)
        self._file.write_text(text + "\n")


def expected(nodeids: Sequence[str], recorded: Mapping[str, float]) -> float:
    """Returns the expected duration, in seconds, of tests that run one after the other.

    Args:
        nodeids: the tests' names.
        recorded: the mean duration, in seconds, of the cases of each test function.
    """
    return sum(recorded.get(function_of(one), UNKNOWN_SECONDS) for one in nodeids)


def function_of(nodeid: str) -> str:
    """Returns the test function of a case, such as `tests/test_x.py::test_y`."""
    return nodeid.partition("[")[0]


def _import() -> float:
    """Returns the CPU seconds that this machine takes to import TensorFlow, the best of three."""
    code = "import tensorflow, time; print(time.process_time())"
    command = [sys.executable, "-c", code]
    done = [subprocess.run(command, check=True, capture_output=True) for _ in range(3)]
    return min(float(one.stdout) for one in done)
