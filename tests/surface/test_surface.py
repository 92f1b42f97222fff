"""The public surface changes on purpose only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.surface.__main__ import lines

KNOWN = Path(__file__).with_name("surface.txt")


@pytest.mark.smoke
def test_the_public_surface():
    known, found = KNOWN.read_text().splitlines(), list(lines())
    changes = [f"- {line}" for line in known if line not in found]
    changes += [f"+ {line}" for line in found if line not in known]
    assert not changes, "python -m tests.surface > tests/surface/surface.txt"
