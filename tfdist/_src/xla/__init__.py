"""Compiles with XLA what a graph computes between its collectives.

XLA compiles whole functions of operations for which it has kernels; for those that communicate it
has none. So a traced step is rebuilt: what runs between its collectives becomes clusters, functions
of their own that XLA compiles. Collectives, input, and what XLA cannot do or does more slowly
remain operations of TensorFlow between them. A cluster computes what one operation outside needs,
so the sum of a bucket begins as soon as its gradients exist, while the backward pass goes on in the
next cluster.

`clusters.py` decides whether XLA may compile an operation and which cluster it belongs to,
`cluster_function.py` makes the function, and `rebuild.py` assembles the step again.
"""

from __future__ import annotations

from tfdist._src.xla.cluster_function import (
    has_rows,
    is_compiled_here,
    left_to_tensorflow,
    or_zeros,
)
from tfdist._src.xla.rebuild import compiled_between_collectives

__all__ = [
    "compiled_between_collectives",
    "has_rows",
    "is_compiled_here",
    "left_to_tensorflow",
    "or_zeros",
]
