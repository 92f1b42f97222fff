"""What the benchmarks make of their flags, without a process for each."""

from __future__ import annotations

import runpy

import pytest
from absl import flags


def check_refused(benchmark: str, wrong: dict[str, str]) -> None:
    """Each of these flags is refused with a message that has the rule."""
    known = flags.FLAGS
    before = set(known)
    try:
        runpy.run_module(f"benchmarks.{benchmark}", run_name=benchmark)
        known([benchmark])
        for argument, rule in wrong.items():
            known.unparse_flags()
            with pytest.raises(flags.Error) as refused:
                known([benchmark, argument])
            assert rule in str(refused.value), argument
    finally:
        known.unparse_flags()
        for name in set(known) - before:  # Another benchmark has flags of the same names.
            delattr(known, name)
