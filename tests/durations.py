"""How long tests take."""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Mapping, Sequence

import pytest


# Of a test that is not recorded.
UNKNOWN_SECONDS = 2.0
RECORDED = pathlib.Path(__file__).with_name("durations.json")


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
