"""The sizes of the models and their batches, for Keras and for torch."""

from __future__ import annotations

SHAPES = {"mlp": (256,), "pipeline": (256,), "batchnorm": (16, 16, 3), "tiny": (8,)}
ROWS = {"mlp": 32, "pipeline": 32, "batchnorm": 16, "tiny": 4}  # per worker and step
# The number of hidden layers with 256 units, for models without convolutions.
HIDDEN = {"mlp": 3, "pipeline": 3, "tiny": 0}
CLASSES = 10
