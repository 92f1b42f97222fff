"""Every C++ test, plain and with sanitizers; longer runs of the same are in docs/native.md."""

from __future__ import annotations

import pytest

from tests.tiers import exhaustive
from tfdist.native import recipe

# Compiling with sanitizers takes minutes.
pytestmark = pytest.mark.timeout(1800)

# variant -> test -> runs, each with its arguments. Forked processes are nothing for the thread
# sanitizer, and what mostly waits, or goes through much data, says nothing new under a sanitizer.
RUNS = {
    "plain": {
        "arithmetic": ((),),
        "codec": ((),),
        "collectives": (("threads", "quick"), ("processes", "quick"), ("processes",), ("many",)),
        "compressed": (("quick",), ()),
        "copies": ((),),
        "data": (("20000",),),
        "endings": (("quick",), ()),
        "frames": (("20000",),),
        "garbage": ((),),
        "groups": ((),),
        "losses": (("kill", "quick"), ("stop", "one"), ("kill",), ("stop",)),
        "mismatches": (("quick",), ()),
        "order": ((),),
        "reduce": ((),),
        "rounding": ((),),
        "rounds": (("20",), ("60",)),
        "segment": (("20000",),),
        "silence": ((),),
        "sparse": ((),),
        "waiting": ((),),
    },
    "address": {
        "arithmetic": ((),),
        "codec": ((),),
        "collectives": (("processes", "quick"),),
        "compressed": (("quick",),),
        "copies": ((),),
        "data": (("20000",),),
        "endings": (("quick",),),
        "frames": (("20000",),),
        "garbage": ((),),
        "groups": ((),),
        "losses": (("kill",),),
        "mismatches": (("quick",),),
        "order": ((),),
        "reduce": ((),),
        "rounding": ((),),
        "rounds": (("20",),),
        "segment": (("20000",),),
        "silence": ((),),
        "sparse": ((),),
        "waiting": ((),),
    },
    "thread": {
        "arithmetic": ((),),
        "collectives": (("threads", "quick"), ("many",)),
        "compressed": (("quick",),),
        "endings": (("quick",),),
        "garbage": ((),),
        "groups": ((),),
        "mismatches": (("quick",),),
        "rounds": (("20",),),
        "silence": ((),),
    },
}
# Of the plain ones; all those with sanitizers are exhaustive.
LONG = {
    ("collectives", ("processes",)),
    ("compressed", ()),
    ("endings", ()),
    ("losses", ("kill",)),
    ("losses", ("stop",)),
    ("mismatches", ()),
    ("rounds", ("60",)),
}
CASES = [
    pytest.param(
        variant,
        name,
        run,
        id="-".join((variant, name, *run)),
        marks=exhaustive if variant != "plain" or (name, run) in LONG else (),
    )
    for variant, tests in RUNS.items()
    for name, runs in tests.items()
    for run in runs
]


@pytest.mark.parametrize(("variant", "name", "arguments"), CASES)
def test(execute, variant, name, arguments):
    execute(variant, name, *arguments)


def test_every_test_is_run():
    files = {path.stem for path in (recipe.SOURCE / "tests").glob("*_test.cc")}
    assert files == {f"{name}_test" for name in RUNS["plain"]}
    assert RUNS["address"].keys() == RUNS["plain"].keys()
