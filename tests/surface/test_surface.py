"""The public surface changes on purpose only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.surface import parsed
from tests.surface.__main__ import ENGINES, MODULES, bases_of, lines
from tests.test_architecture import PUBLIC

KNOWN = Path(__file__).with_name("surface.txt")


@pytest.mark.smoke
def test_the_public_surface():
    known, found = KNOWN.read_text().splitlines(), list(lines())
    changes = [f"- {line}" for line in known if line not in found]
    changes += [f"+ {line}" for line in found if line not in known]
    assert not changes, "python -m tests.surface > tests/surface/surface.txt"


def test_every_public_module_is_part_of_it():
    assert {*MODULES, *ENGINES} - {"", "errors"} == PUBLIC - {"__init__", "__main__"}


@pytest.mark.parametrize("module", ["callbacks", "elastic", "global_batch"])
def test_a_file_states_what_its_module_has(module):
    """Modules that need an extra are not imported, but read."""
    # A file does not show the values of attributes, nor of a default that is a name.
    left_out = re.compile(r"(class )?tfdist\.callbacks\.(Callback|StragglerMonitor)\W")
    stated = [line for line in parsed.lines(module, bases_of) if not left_out.match(line)]
    mine = re.compile(rf"(class )?tfdist\.{module}\.")
    known = [line for line in KNOWN.read_text().splitlines() if mine.match(line)]
    assert stated == [line for line in known if not left_out.match(line)]
