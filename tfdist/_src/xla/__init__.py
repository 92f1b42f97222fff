"""Lets XLA compile the computation between the collectives of a graph.

XLA compiles whole functions, and needs kernels for all operations of a function. It has no kernels
for operations that communicate. So a traced step is rebuilt: the operations between its collectives
become clusters, which are functions that XLA compiles. All other operations remain TensorFlow
operations between the clusters: collectives, input, and operations that XLA cannot compile or would
run more slowly. Each cluster contains the operations that the next operation outside of the
clusters needs. So the sum of a bucket begins as soon as its gradients exist, while the backward
pass continues in the next cluster.

`clusters.py` decides whether XLA may compile an operation and assigns it to a cluster,
`cluster_function.py` makes the function, and `rebuild.py` assembles the step again.
"""

from tfdist._src.xla.cluster_function import (
    has_rows,
    is_compiled_here,
    or_zeros,
    uncompiled_scope,
)
from tfdist._src.xla.rebuild import compiled_between_collectives

__all__ = [
    "compiled_between_collectives",
    "has_rows",
    "is_compiled_here",
    "or_zeros",
    "uncompiled_scope",
]
