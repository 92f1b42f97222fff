"""The default tests stay a selection."""

from __future__ import annotations

import pytest

from tests.tiers import rotating, some

# Default tests in these folders; most of the time is that of tests of workers, which the last two
# have. Whoever adds one takes another one out. Cheap checks of long lists are loops in one test.
MOST = {"tests": 2252, "tests/pipeline": 440, "tests/strategies": 206}


@pytest.mark.parametrize("folder", MOST)
def test_the_default_tier_is_no_longer_than_it_may_be(request, folder):
    items = [item for item in request.session.items if item.nodeid.startswith(f"{folder}/")]
    found = sum(item.get_closest_marker("exhaustive") is None for item in items)
    assert found <= MOST[folder]


def default(cases):
    return [case.values for case in cases if not case.marks]


def test_some_are_default_and_the_others_exhaustive():
    cases = some(["a", "b", ("c", 1)], always=["b", ("c", 1)])
    assert [case.values for case in cases] == [("a",), ("b",), ("c", 1)]
    assert default(cases) == [("b",), ("c", 1)]
    assert [mark.name for mark in cases[0].marks] == ["exhaustive"]
    with pytest.raises(ValueError, match=r"Received: \['d'\] besides"):
        some(["a"], always=["d"])


def test_a_rotation_meets_every_value_and_every_partner():
    for values, others in [("abc", "12"), ("ab", "123"), ("a", "1")]:
        cases = rotating(values, others)
        assert {case.values for case in cases} == {(v, o) for v in values for o in others}
        met = default(cases)
        assert {v for v, _ in met} == set(values)
        assert {o for _, o in met} == set(others)
        assert len(met) == max(len(values), len(others))
