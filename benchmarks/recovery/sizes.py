"""The sizes of the models and of their batches. They are the same for Keras and torch."""

from __future__ import annotations

SHAPES = {"mlp": (256,), "pipeline": (256,), "batchnorm": (16, 16, 3), "tiny": (8,)}
# The number of rows per worker and step.
ROWS = {"mlp": 32, "pipeline": 32, "batchnorm": 16, "tiny": 4}
# The number of hidden layers, for models without convolutions. Each has 256 units.
HIDDEN = {"mlp": 3, "pipeline": 3, "tiny": 0}
CLASSES = 10
