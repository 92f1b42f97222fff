"""The models that are timed: what a step is fed. Each is built in Keras and in torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one worker feeds a model in a step: random inputs and labels, the same every time.

    Attributes:
        name: of the model, in `keras_models` and `torch_models`.
        shape: one row of the input.
        labels: one row of the labels.
        classes: labels, and input where it is integers, are below this.
        rows: rows per worker and step.
        steps: steps in a round, unless the user says otherwise.
        integers: whether the input is integers.
        optimizer: one of `OPTIMIZERS`.
    """

    name: str
    shape: tuple[int, ...]
    labels: tuple[int, ...]
    classes: int
    rows: int
    steps: int
    integers: bool = False
    optimizer: str = "sgd"


# With Keras's learning rates.
OPTIMIZERS = {"sgd": 0.01, "adam": 0.001}

MODELS = {
    model.name: model
    for model in (
        Workload("tiny", (8,), (), 4, rows=4, steps=3),
        Workload("mlp", (2048,), (), 10, rows=32, steps=40),
        Workload("cnn", (32, 32, 3), (), 10, rows=64, steps=20),
        Workload("resnet", (32, 32, 3), (), 10, rows=32, steps=10),
        Workload("gpt", (128,), (128,), 256, rows=8, steps=5, integers=True),
        Workload("lstm", (64,), (), 1000, rows=32, steps=10, integers=True),
    )
}
