"""The cost of each call of a model."""

from __future__ import annotations

import dataclasses
import math

from tfdist._src.pipeline.partition.graph import Call, Graph
from tfdist._src.pipeline.partition.sizes import bytes_of, concrete, count, variable_bytes

# A nominal processor: multiply-adds per second, and bytes per second to and from memory.
_MULTIPLICATIONS = 1e10
_BYTES = 1e10


@dataclasses.dataclass(frozen=True)
class CallCost:
    """The cost of a call for the rows of a microbatch.

    Attributes:
        forward, backward: seconds.
        parameters: the number of elements of the layer's weights, counted at every call.
        parameter_bytes: the bytes of all variables that it uses.
        output_bytes: the bytes of its outputs.
    """

    forward: float
    backward: float
    parameters: int
    parameter_bytes: int
    output_bytes: int

    @property
    def seconds(self) -> float:
        """The seconds of both passes."""
        return self.forward + self.backward


def cost_of(graph: Graph, call: Call, rows: int, forward: float, backward: float) -> CallCost:
    """The cost of a call with these times."""
    return CallCost(
        forward,
        backward,
        parameters=0 if call.layer is None else count(call.layer.weights),
        parameter_bytes=sum(map(variable_bytes, call.variables)),
        output_bytes=sum(bytes_of(graph.specs[key], rows) for key in call.outputs),
    )


def estimate(graph: Graph, rows: int) -> list[CallCost]:
    """Estimates the costs of calls from their parameters, identically in all processes.

    Each element of a matrix or kernel is multiplied once per row and position of the values, and
    twice in the backward pass; those of an embedding are looked up. The seconds are those of a
    nominal processor.

    Args:
        graph: the model.
        rows: the rows of a microbatch.
    """
    costs = []
    for call in graph.calls:
        values = [graph.specs[key] for key in (*call.inputs, *call.outputs)]
        moved = sum(bytes_of(spec, rows) for spec in values) / _BYTES
        forward = _multiplications(graph, call, rows) / _MULTIPLICATIONS + moved
        costs.append(cost_of(graph, call, rows, forward, 2 * forward))
    return costs


def _multiplications(graph: Graph, call: Call, rows: int) -> int:
    inputs = [graph.specs[key] for key in call.inputs]
    if not any(spec.is_floating for spec in inputs):
        return 0  # Integers look values up.
    # All axes but the last, the features.
    specs = (*inputs, *(graph.specs[key] for key in call.outputs))
    positions = max(math.prod(concrete(spec, rows)[:-1]) for spec in specs)
    return positions * count(v for v in call.variables if len(v.shape) > 1)
