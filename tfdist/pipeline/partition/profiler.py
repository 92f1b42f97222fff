"""Times each call of a model on this machine."""

from __future__ import annotations

from collections.abc import Hashable

import tensorflow as tf

from tfdist.errors import PartitionError
from tfdist.internals.keras import unchanged_state
from tfdist.pipeline.partition.call_timing import Timing, seconds_of, time_call
from tfdist.pipeline.partition.cost_model import CallCost, cost_of
from tfdist.pipeline.partition.equivalence import equivalence
from tfdist.pipeline.partition.graph import Call, Graph, Key
from tfdist.pipeline.partition.sizes import concrete


def measure(graph: Graph, rows: int) -> list[CallCost]:
    """Times the forward and the backward pass of each call, with made-up numbers.

    Calls of equal layers on values of equal shapes are timed once. The model's own variables are
    neither read nor written, and may be without values: each call is given numbers in their place,
    which are freed before the next. Nor does any state of random numbers change.

    Args:
        graph: the model.
        rows: of a microbatch.

    Returns:
        The costs in the order of the calls. They differ from process to process: let one of them
        measure, and send the others its `seconds`.

    Raises:
        PartitionError: a call fails with made-up numbers.
    """
    with unchanged_state():
        return _Meter(graph, rows).run()


class _Meter:
    """Follows the shapes of a model's values from call to call, and times what is new."""

    def __init__(self, graph: Graph, rows: int) -> None:
        self._graph, self._rows = graph, rows
        self._specs: dict[Key, tf.TensorSpec] = {}
        self._masks: dict[Key, tf.TensorSpec | None] = {}
        self._known: dict[Hashable, Timing] = {}
        idle, something = tf.function(tf.identity), tf.zeros([1])
        self._overhead = seconds_of(lambda: idle(something))

    def run(self) -> list[CallCost]:
        for key in self._graph.inputs:
            spec = self._graph.specs[key]
            self._specs[key] = tf.TensorSpec(concrete(spec, self._rows), spec.dtype)
        return [self._cost(call) for call in self._graph.calls]

    def _cost(self, call: Call) -> CallCost:
        timing = self._timing(call)
        self._specs.update(zip(call.outputs, timing.made, strict=True))
        self._masks.update(zip((*call.inputs, *call.outputs), timing.masks, strict=True))
        forward = max(timing.forward - self._overhead, 0.0)
        backward = max(timing.both - timing.forward, 0.0)
        return cost_of(self._graph, call, self._rows, forward, backward)

    def _timing(self, call: Call) -> Timing:
        specs = tuple(self._specs[key] for key in call.inputs)
        masks = tuple(self._masks.get(key) for key in call.inputs)
        # Nobody asks for the gradient of a batch.
        wanted = tuple(key not in self._graph.inputs for key in call.inputs)
        name = (equivalence(call), specs, masks, wanted)
        if name not in self._known:
            try:
                self._known[name] = time_call(call, specs, masks, wanted)
            except Exception as error:
                raise PartitionError(
                    "To be timed, a call must run on made-up numbers. Received: "
                    f"{type(error).__name__} from '{call.name}'. Divide the model by "
                    'by="parameters" or by cuts=[...], which run nothing.'
                ) from error
        return self._known[name]
