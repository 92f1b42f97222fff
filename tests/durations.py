"""How long tests take on an idle machine of two cores, as `tests/durations.json` has it."""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Iterable

import pytest

RECORDED = pathlib.Path(__file__).with_name("durations.json")

# What a test counts that has not been recorded.
UNKNOWN_SECONDS = 2.0


class Recorder:
    """A plugin of pytest that writes the mean seconds of the cases of each test function.

    Args:
        file: where it writes. What the file has of other test functions stays.
    """

    def __init__(self, file: pathlib.Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._cases: dict[str, set[str]] = collections.defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = function_of(report.nodeid)
        self._seconds[name] += report.duration
        self._cases[name].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        before = json.loads(self._file.read_text()) if self._file.exists() else {}
        means = {name: round(s / len(self._cases[name]), 2) for name, s in self._seconds.items()}
        text = json.dumps({**before, **means}, indent=0, sort_keys=True)
        self._file.write_text(text + "\n")


def function_of(nodeid: str) -> str:
    """The test function of a case, as `tests/test_x.py::test_y`."""
    return nodeid.partition("[")[0]


def expected(nodeids: Iterable[str], recorded: dict[str, float]) -> float:
    """The seconds that tests take, one after the other."""
    return sum(recorded.get(function_of(nodeid), UNKNOWN_SECONDS) for nodeid in nodeids)
