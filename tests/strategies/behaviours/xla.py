"""XLA, which works where there are no collectives."""

from __future__ import annotations

from tests.strategies.behaviours.common import compile_mlp, fit, outcome, rows


def compiled_by_xla(strategy):
    model = compile_mlp(strategy, jit_compile=True)
    x, y = rows(40)
    return outcome(model, fit(model, x, y, batch_size=16, validation_data=(x, y)))
