"""Models that are changed for fine-tuning or inference."""

from __future__ import annotations

from tests.strategy.behaviours.common import cross_entropy, fit, mlp, outcome, rows, scope
from tests.strategy.behaviours.faults import message


def lora(strategy):
    """The first layer trains its low-rank matrices only."""
    x, y = rows(45)
    with scope(strategy):
        model = mlp()
        model.layers[0].enable_lora(rank=2)
        model.compile("adam", cross_entropy(), metrics=["accuracy"])
    history = fit(model, x, y, batch_size=20)
    trained = [v.path.rpartition("/")[2] for v in model.trainable_variables]
    moved = bool(model.layers[0].lora_kernel_b.numpy().any())  # It begins as zeros.
    return outcome(model, history, trained=trained, moved=moved)


def quantized(strategy):
    x, _ = rows(45)
    with scope(strategy):
        model = mlp()  # Untrained: a last bit of a trained weight may change its int8.
        model.quantize("int8")
    kinds = [v.dtype for v in model.variables]
    return {"predictions": model.predict(x, batch_size=20, verbose=0), "kinds": kinds}


def lora_outside(strategy):
    x, y = rows(12)
    with scope(strategy):
        model = mlp()
    model.layers[0].enable_lora(rank=2)
    with scope(strategy):
        model.compile("adam", cross_entropy())
    return message(lambda: fit(model, x, y))
