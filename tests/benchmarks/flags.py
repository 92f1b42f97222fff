"""What the benchmarks make of their flags, without a process for each."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from absl import flags

FOLDER = Path(__file__).parents[2] / "benchmarks"


def check_refused(script: str, wrong: dict[str, str]) -> None:
    """Each of these flags is refused with a message that has the rule."""
    known = flags.FLAGS
    before = set(known)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        try:
            runpy.run_path(str(FOLDER / script), run_name=script)
            known([script])
            for argument, rule in wrong.items():
                known.unparse_flags()
                with pytest.raises(flags.Error) as refused:
                    known([script, argument])
                assert rule in str(refused.value), argument
        finally:
            known.unparse_flags()
            for name in set(known) - before:  # Another script has flags of the same names.
                delattr(known, name)
