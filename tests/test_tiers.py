"""The default tests stay a selection."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from tests.harness import durations
from tests.harness.tiers import covering, in_part, rotating, some, spread

# Of the default tests on two idle cores. Whoever adds one that takes long takes another one out.
# Cheap checks of long lists are loops in one test.
MAX_SECONDS = 8 * 60
CORES = 2
ROOT = pathlib.Path(__file__).parents[1]


def test_the_default_tier_takes_no_longer_than_it_may(request):
    items = request.session.items
    others = ("exhaustive", "combinations")
    default = [i.nodeid for i in items if not any(map(i.get_closest_marker, others))]
    found = durations.expected(default, json.loads(durations.RECORDED.read_text()))
    assert found <= MAX_SECONDS * CORES, "pytest --record-durations tests/harness/durations.json"


def test_durations_are_means_over_the_cases_of_a_test(tmp_path):
    file = tmp_path / "durations.json"
    file.write_text('{"tests/a.py::test_kept": 3.0}')
    recorder = durations.Recorder(file, speed=0.5)
    for name, seconds in [("test_x[1]", 1.0), ("test_x[1]", 0.5), ("test_x[2-[b]]", 2.5)]:
        recorder.pytest_runtest_logreport(
            types.SimpleNamespace(nodeid=f"tests/a.py::{name}", duration=seconds)
        )
    recorder.pytest_sessionfinish()
    recorded = json.loads(file.read_text())
    assert recorded == {"tests/a.py::test_kept": 3.0, "tests/a.py::test_x": 1.0}
    seconds = durations.expected(
        ["tests/a.py::test_x[3]", "tests/a.py::test_x[4]", "tests/b.py::test_new"], recorded
    )
    assert seconds == 2 * 1.0 + durations.UNKNOWN_SECONDS


def default(cases):
    return [case.values for case in cases if not case.marks]


def test_some_are_default_and_the_others_exhaustive():
    cases = some(["a", "b", ("c", 1)], always=["b", ("c", 1)])
    assert [case.values for case in cases] == [("a",), ("b",), ("c", 1)]
    assert default(cases) == [("b",), ("c", 1)]
    assert [mark.name for mark in cases[0].marks] == ["exhaustive"]
    with pytest.raises(ValueError, match=r"Received: \['d'\] besides"):
        some(["a"], always=["d"])


def test_other_markers_select_from_the_same_list():
    cases = some(["a", "b", "c"], always=["a"], smoke=["a", "b"], oldest=["b"])
    assert [[mark.name for mark in case.marks] for case in cases] == [
        ["smoke"],
        ["exhaustive", "smoke", "oldest"],
        ["exhaustive"],
    ]
    with pytest.raises(ValueError, match=r"`smoke` is a part of `values`. Received: \['d'\]"):
        some(["a"], always=[], smoke=["d"])


def test_a_rotation_meets_every_value_and_every_partner():
    for values, others in [("abc", "12"), ("ab", "123"), ("a", "1")]:
        cases = rotating(values, others)
        assert {case.values for case in cases} == {(v, o) for v in values for o in others}
        met = default(cases)
        assert {v for v, _ in met} == set(values)
        assert {o for _, o in met} == set(others)
        assert len(met) == max(len(values), len(others))


def test_other_values_than_the_covering_ones_are_combinations():
    cases = some(["a", "b", "c"], always=["a"], covering=["b"])
    assert [[mark.name for mark in case.marks] for case in cases] == [
        [],
        ["exhaustive"],
        ["combinations"],
    ]


@pytest.mark.parametrize("sizes", [(3, 4), (5, 1), (2, 3, 4), (3, 3, 3, 3)])
def test_covering_cases_have_each_value_or_each_pair(sizes):
    cases = list(itertools.product(*map(range, sizes)))
    chosen = [cases[i] for i in covering(cases)]
    size = min(2, len(sizes) - 1)
    for places in itertools.combinations(range(len(sizes)), size):
        met = {tuple(case[i] for i in places) for case in chosen}
        assert met == set(itertools.product(*(range(sizes[i]) for i in places)))
    fewest = np.prod(sorted(sizes)[-size:])
    assert fewest <= len(chosen) <= (1 if size == 1 else 2) * fewest


def test_cases_that_run_anyway_count_for_the_covering():
    cases = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert covering(cases, chosen=[0]) == {3}
    assert covering(cases, chosen=[0, 3]) == set()


def test_each_value_meets_as_many_others():
    pairs = spread("abc", "1234", 2)
    assert len(set(pairs)) == 6 and {other for _, other in pairs} == set("1234")
    assert spread("ab", "12", 5) == [("a", "1"), ("a", "2"), ("b", "2"), ("b", "1")]


PROGRAM = """
import pytest

@pytest.mark.exhaustive
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", "xyz")
def test_two(a, b): pass

@pytest.mark.exhaustive
@pytest.mark.parametrize("a", [1, 2, 3])
def test_one(a): pass
"""
CONFTEST = """
import pytest
from tests.harness.tiers import reduce_combinations

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    reduce_combinations(items)
"""


def test_the_exhaustive_tier_covers_combinations(tmp_path):
    (tmp_path / "test_program.py").write_text(PROGRAM)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  exhaustive\n  combinations\n")
    for marker, expected in [("exhaustive", 3 + 3), ("combinations", 6)]:
        command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
        assert f"{expected} passed" in done.stdout.decode(), done


def test_each_case_is_in_one_part():
    names = [f"tests/a.py::test_x[{i}]" for i in range(200)]
    parts = [{name for name in names if in_part(name, f"{i}/3")} for i in (1, 2, 3)]
    assert set.union(*parts) == set(names) and sum(map(len, parts)) == len(names)
    assert all(len(part) > 40 for part in parts)
    for wrong in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(ValueError, match="must be I/N"):
            in_part("x", wrong)
