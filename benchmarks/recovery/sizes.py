"""How large the models and their batches are, for Keras and for torch."""

from __future__ import annotations

SHAPES = {"mlp": (256,), "pipeline": (256,), "batchnorm": (16, 16, 3), "tiny": (8,)}
ROWS = {"mlp": 32, "pipeline": 32, "batchnorm": 16, "tiny": 4}  # per worker and step
# Hidden layers of 256 units of those without convolutions.
HIDDEN = {"mlp": 3, "pipeline": 3, "tiny": 0}
CLASSES = 10
