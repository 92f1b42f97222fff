"""The models that are timed, and the input of a step. Each is built in Keras and in torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """The input of a worker's step: random values and labels, the same in each step.

    Attributes:
        name: the name of the model, in `keras_models` and `torch_models`.
        shape: the shape of one row of the input.
        labels: the shape of one row of the labels.
        classes: the number of values of the labels, and of the input if it consists of integers.
        rows: the number of rows per worker and step.
        steps: the default number of steps in a round.
        integers: whether the input consists of integers.
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


# The optimizers, with Keras's default learning rates.
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
