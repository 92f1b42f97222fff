"""What each call of a model costs."""

from __future__ import annotations

import dataclasses
import math

from tfdist.pipeline.partition.graph import Call, Graph
from tfdist.pipeline.partition.sizes import bytes_of, concrete, count, variable_bytes

# A nominal machine: multiplications with additions in a second, bytes to and from memory.
_MULTIPLICATIONS = 1e10
_BYTES = 1e10


@dataclasses.dataclass(frozen=True)
class CallCost:
    """What a call costs for the rows of a microbatch.

    Attributes:
        forward, backward: seconds.
        parameters: the numbers in the layer's weights; those of a layer that is called again count
            again.
        parameter_bytes: the bytes of all variables that it uses.
        output_bytes: the bytes of what it makes.
    """

    forward: float
    backward: float
    parameters: int
    parameter_bytes: int
    output_bytes: int

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward + self.backward


def cost_of(graph: Graph, call: Call, rows: int, forward: float, backward: float) -> CallCost:
    """The cost of a call that takes so many seconds."""
    return CallCost(
        forward,
        backward,
        parameters=0 if call.layer is None else count(call.layer.weights),
        parameter_bytes=sum(map(variable_bytes, call.variables)),
        output_bytes=sum(bytes_of(graph.specs[key], rows) for key in call.outputs),
    )


def estimate(graph: Graph, rows: int) -> list[CallCost]:
    """Estimates the calls' costs from their parameters, the same in all processes.

    Each number of a matrix or a kernel is multiplied once for every row and position of the
    values, backward twice; those of an embedding are looked up. The seconds are those of a nominal
    machine.

    Args:
        graph: the model.
        rows: of a microbatch.
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
        return 0  # Numbers are looked up by integers.
    # All axes but the last, that of the features.
    specs = (*inputs, *(graph.specs[key] for key in call.outputs))
    positions = max(math.prod(concrete(spec, rows)[:-1]) for spec in specs)
    return positions * count(v for v in call.variables if len(v.shape) > 1)
