"""How long tests take."""

from __future__ import annotations

import collections
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

# Of a test that is not recorded.
UNKNOWN_SECONDS = 2.0
RECORDED = pathlib.Path(__file__).with_name("durations.json")
# How long an idle processor of the machine whose seconds are recorded takes to import TensorFlow.
_IMPORT_SECONDS = 7.0


class Recorder:
    """A plugin of pytest that writes the mean seconds of the cases of each test function.

    Seconds are those of a machine of a certain speed, whichever machine records them.

    Args:
        file: where it writes. What the file has of other test functions stays.
        speed: how many of that machine's seconds are one of this machine; by default it is measured
            at the end.
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
    """How many seconds some tests take, one after the other.

    Args:
        nodeids: the tests' names.
        recorded: the mean seconds of the cases of test functions.
    """
    return sum(recorded.get(function_of(one), UNKNOWN_SECONDS) for one in nodeids)


def function_of(nodeid: str) -> str:
    """The test function of a case, as `tests/test_x.py::test_y`."""
    return nodeid.partition("[")[0]


def _import() -> float:
    """How long this machine takes to import TensorFlow, the best of three; in seconds."""
    code = "import tensorflow, time; print(time.process_time())"
    command = [sys.executable, "-c", code]
    done = [subprocess.run(command, check=True, capture_output=True) for _ in range(3)]
    return min(float(one.stdout) for one in done)
