"""Programs from all of Keras's public API have the same results as in one process."""

from __future__ import annotations

import fnmatch
import importlib

import pytest

from tests.enumeration import expected
from tests.enumeration.programs import HUB, PARTS, covering_names, difference, names
from tests.harness.tiers import some

_ALL = [name for part in PARTS for name in names(part)]
_DEFAULT = [name for part in PARTS for name in names(part, only_default=True)]
_COVERING = [name for part in PARTS for name in covering_names(part)]


@pytest.mark.parametrize("program", some(_ALL, always=_DEFAULT, covering=_COVERING))
def test_as_in_one_process(program):
    differs = difference(program)
    if pattern := expected.pattern_of(program):
        # If several programs match the pattern, some of them need not differ.
        assert differs or len(fnmatch.filter(_ALL, pattern)) > 1, (
            f"It does not differ any more. Remove {pattern} from the table of docs/guide/keras.md."
        )
        return
    assert not differs, f"{differs}\n\npython -m tests.enumeration {program!r}"


def test_every_difference_of_the_documentation_has_a_program():
    assert expected.differences(), "docs/guide/keras.md names no layer, loss or metric."
    for pattern in expected.differences():
        assert fnmatch.filter(_ALL, pattern), pattern


@pytest.mark.parametrize("part", list(expected.WITHOUT_A_PROGRAM))
def test_everything_public_has_a_program(part):
    missing = importlib.import_module(f"tests.enumeration.{part}").missing()
    assert not expected.unexpected(part, missing)
    assert not expected.unused(part, missing)


@pytest.mark.exhaustive
def test_everything_public_of_keras_hub_has_a_program():
    for package in HUB:
        pytest.importorskip(package)
    hub = importlib.import_module("tests.enumeration.hub")
    assert not [name for name in hub.missing() if hub.reason(name) is None]
