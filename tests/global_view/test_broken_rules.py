"""The tests of programs detect a rule that ignores how workers hold a value."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import pytest

from tests.global_view.simulation import analyze, check, trace
from tests.global_view.test_rules import COUPLED, ROWWISE, differentiated, inputs_of
from tests.harness.tiers import exhaustive
from tfdist._src.global_view.layout import WHOLE
from tfdist._src.global_view.rules import RULES

SHARES = [4, 4, 3]


@functools.cache
def programs_of() -> dict[str, list[str]]:
    """Maps each type of operation to the programs that apply it to rows or partial sums."""
    found: dict[str, list[str]] = {}
    for name, (shapes, program, *_) in {**ROWWISE, **COUPLED}.items():
        inputs = inputs_of(shapes)
        analysis = analyze(trace(differentiated(program), inputs), inputs)
        for op, decision in analysis.decisions.items():
            if any(_is_apart(layout) for layout in decision.outputs):
                found.setdefault(op.type, []).append(name)
    return found


def _is_apart(layout: Any) -> bool:
    return layout.kind in ("rows", "partial")


def forgetful(rule: Any) -> Any:
    """Returns a broken rule, which takes a worker's rows or its part of a sum for the whole."""

    def broken(call: Any) -> Any:
        decision = rule(call)
        if decision is None or not any(map(_is_apart, decision.outputs)):
            return decision
        outputs = [WHOLE if _is_apart(layout) else layout for layout in decision.outputs]
        return dataclasses.replace(decision, outputs=outputs, values=None)

    return broken


@exhaustive
def test_every_rule_is_needed():
    assert [kind for kind in sorted(programs_of()) if not _is_found(kind)] == []


def _is_found(kind: str) -> bool:
    """Whether a program differs when the rule of a type of operations is broken."""
    with mock.patch.dict(RULES, {kind: forgetful(RULES[kind])}):
        return any(_differs(name) for name in dict.fromkeys(programs_of()[kind]))


def _differs(name: str) -> bool:
    shapes, program, *_ = ROWWISE.get(name) or COUPLED[name]
    try:
        check(differentiated(program), inputs_of(shapes), SHARES)
    except Exception:
        return True
    return False


def test_a_sum_without_its_reduction_is_found():
    assert not _differs("means")
    shapes, program = ROWWISE["means"]
    broken = mock.patch.dict(RULES, {"Mean": forgetful(RULES["Mean"])})
    with broken, pytest.raises(AssertionError):
        check(differentiated(program), inputs_of(shapes), SHARES)
