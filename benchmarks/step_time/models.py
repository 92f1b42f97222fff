"""The models that the benchmark trains, and the input of their training steps.

The modules `keras_models` and `torch_models` build these models.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, and the input of its training step.

    The input and the labels are random. They are the same in every step.

    Attributes:
        name: the name of the model in `keras_models.BUILDERS` and `torch_models.BUILDERS`.
        shape: the shape of the input without the batch dimension.
        labels: the shape of the labels without the batch dimension.
        classes: the number of classes: labels are integers from 0 to `classes - 1`. If the input
            consists of integers, they are in the same range.
        rows: the number of rows per worker and step.
        steps: the default number of steps in a round.
        integers: whether the input consists of integers.
        optimizer: a key of `OPTIMIZERS`.
    """

    name: str
    shape: tuple[int, ...]
    labels: tuple[int, ...]
    classes: int
    rows: int
    steps: int
    integers: bool = False
    optimizer: str = "sgd"


# For each optimizer, Keras's default learning rate, which torch must use, too.
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
