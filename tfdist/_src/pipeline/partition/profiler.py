"""Times each call of a model on this host."""

from __future__ import annotations

from collections.abc import Hashable

import tensorflow as tf

from tfdist._src.internals.keras import unchanged_state
from tfdist._src.pipeline.partition.call_timing import Timing, seconds_of, time_call
from tfdist._src.pipeline.partition.cost_model import CallCost, cost_of
from tfdist._src.pipeline.partition.equivalence import equivalence
from tfdist._src.pipeline.partition.graph import Call, Graph, Key
from tfdist._src.pipeline.partition.sizes import concrete
from tfdist.errors import PartitionError


def measure(graph: Graph, rows: int) -> list[CallCost]:
    """Times the forward and the backward pass of each call, on synthetic data.

    Calls of equal layers on values of equal shapes are timed once. The model's variables are
    neither read nor written, and may be without values: each call gets synthetic ones, which are
    freed before the next. Random states do not change either.

    Args:
        graph: the model.
        rows: the rows of a microbatch.

    Returns:
        The costs in the order of the calls. They differ between processes: let one of them measure,
        and send its `seconds` to the others.

    Raises:
        PartitionError: a call fails on synthetic data.
    """
    with unchanged_state():
        return _Profiler(graph, rows).run()


class _Profiler:
    """Propagates shapes from call to call, and times each new kind of call."""

    def __init__(self, graph: Graph, rows: int) -> None:
        self._graph, self._rows = graph, rows
        self._specs: dict[Key, tf.TensorSpec] = {}
        self._masks: dict[Key, tf.TensorSpec | None] = {}
        self._timings: dict[Hashable, Timing] = {}
        idle, something = tf.function(tf.identity), tf.zeros([1])
        self._overhead = seconds_of(lambda: idle(something))

    def run(self) -> list[CallCost]:
        for key in self._graph.inputs:
            spec = self._graph.specs[key]
            self._specs[key] = tf.TensorSpec(concrete(spec, self._rows), spec.dtype)
        return [self._cost(call) for call in self._graph.calls]

    def _cost(self, call: Call) -> CallCost:
        timing = self._timing(call)
        self._specs.update(zip(call.outputs, timing.outputs, strict=True))
        self._masks.update(zip((*call.inputs, *call.outputs), timing.masks, strict=True))
        forward = max(timing.forward - self._overhead, 0.0)
        backward = max(timing.both - timing.forward, 0.0)
        return cost_of(self._graph, call, self._rows, forward, backward)

    def _timing(self, call: Call) -> Timing:
        specs = tuple(self._specs[key] for key in call.inputs)
        masks = tuple(self._masks.get(key) for key in call.inputs)
        # The gradient of the batch is not needed.
        wanted = tuple(key not in self._graph.inputs for key in call.inputs)
        name = (equivalence(call), specs, masks, wanted)
        if name not in self._timings:
            try:
                self._timings[name] = time_call(call, specs, masks, wanted)
            except Exception as error:
                raise PartitionError(
                    "To be timed, a call must run on synthetic data. Received: "
                    f"{type(error).__name__} from '{call.name}'. Use balance=\"parameters\" or "
                    "cuts=[...], which run nothing."
                ) from error
        return self._timings[name]
