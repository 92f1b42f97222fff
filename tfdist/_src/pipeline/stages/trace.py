"""Traces a stage's forward and backward pass into one graph, which is later cut into parts."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist._src.global_view.analysis import Analysis
from tfdist._src.global_view.decision import Value, dims_of
from tfdist._src.global_view.explain import where
from tfdist._src.global_view.layout import PER_WORKER, WHOLE, ZEROED_SUM, Layout, Symbol
from tfdist._src.global_view.partition import Partition, WorkerEmitter
from tfdist._src.global_view.resharding import RowShare
from tfdist._src.internals.extended import copy_here
from tfdist._src.internals.graphs import trace_into_graph
from tfdist._src.internals.tensorflow import element_type
from tfdist._src.pipeline.stages.value_specs import ValueSpec
from tfdist._src.strategy.step import GlobalStep
from tfdist.errors import UnsupportedError


@dataclass(frozen=True)
class Forward:
    """The result of a stage's forward pass.

    Attributes:
        outputs: the results for which the stage receives gradients.
        others: the results without a gradient.
        steps: the intermediate values. If the backward pass is split, its first part consists of
            the operations that compute the gradients of these values and of the stage's inputs. The
            other operations are needed only for the gradients of variables, so they form the second
            part.
    """

    outputs: Sequence[tf.Tensor]
    others: Sequence[tf.Tensor] = ()
    steps: Sequence[tf.Tensor] = ()


@dataclass(frozen=True)
class Trace:
    """The graph of a stage's forward and backward pass, and its input and output tensors.

    Attributes:
        graph: the graph.
        captured: the tensors that the graph captures from outside, by the names of the placeholders
            that stand for them in the graph.
        inputs: the placeholders for the inputs.
        outputs: the results of the forward pass for which the stage receives gradients.
        others: the results of the forward pass without a gradient.
        seeds: the placeholders for the gradients of `outputs`.
        input_gradients: for each input, its gradient, or None if it has no gradient.
        step_gradients: the gradients of the intermediate values, without missing gradients.
        variable_gradients: for each variable, its gradient: a tensor, `tf.IndexedSlices`, or None.
        effects: the operations of the forward pass with side effects, in order.
        backward_effects: the operations of the backward pass with side effects, in order.
    """

    graph: Any
    captured: dict[str, Any]
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    others: list[tf.Tensor]
    seeds: list[tf.Tensor]
    input_gradients: list[Any]
    step_gradients: list[tf.Tensor]
    variable_gradients: list[Any]
    effects: list[tf.Operation]
    backward_effects: list[tf.Operation] = field(default_factory=list)


def trace_forward(forward: Callable[..., Forward], inputs: Sequence[tf.TensorSpec]) -> Trace:
    """Traces a forward pass without a backward pass.

    Args:
        forward: the forward pass, as a function that takes one tensor for each of `inputs`.
        inputs: the specs of the inputs.
    """
    made: dict[str, Any] = {}
    both = _both(forward, [False] * len(inputs), [], made, backward=False)

    def traced(*tensors: tf.Tensor) -> list[tf.Tensor]:
        both(*tensors)
        return [tf.identity(t) for t in made["result"].outputs]

    concrete = tf.function(traced, autograph=False).get_concrete_function(*inputs)
    return Trace(
        graph=concrete.graph,
        captured=_captured(concrete, len(inputs)),
        inputs=list(concrete.inputs[: len(inputs)]),
        outputs=list(made["result"].outputs),
        others=list(made["result"].others),
        seeds=[],
        input_gradients=[None] * len(inputs),
        step_gradients=[],
        variable_gradients=[],
        effects=made["effects"],
    )


def _both(
    forward: Callable[..., Forward],
    differentiable: Sequence[bool],
    variables: Sequence[Any],
    made: dict[str, Any],
    *,
    backward: bool,
) -> Callable[..., None]:
    """Returns a function that adds a forward and a backward pass to the default graph.

    Args:
        forward: the forward pass.
        differentiable: for each input of `forward`, whether to compute its gradient.
        variables: the variables for which to compute gradients.
        made: a dictionary to which the returned function adds its results, gradients and side
            effects.
        backward: whether to add the backward pass.
    """

    def both(*tensors: tf.Tensor) -> None:
        watched = [t for t, wanted in zip(tensors, differentiable, strict=True) if wanted]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            if backward:
                tape.watch([*watched, *variables])
            result = forward(*tensors)
        graph = tf.compat.v1.get_default_graph()
        made["result"] = result
        made["effects"] = [op for op in graph.get_operations() if _has_effect(op)]
        if backward:
            made["seeds"] = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in result.outputs]
            steps = [t for t in result.steps if t.dtype.is_floating]
            gradients = tape.gradient(
                list(result.outputs), [*watched, *steps, *variables], made["seeds"]
            )
            made["gradients"] = (
                gradients[: len(watched)],
                gradients[len(watched) : len(watched) + len(steps)],
                gradients[len(watched) + len(steps) :],
            )
            forward_effects = set(made["effects"])
            made["backward effects"] = [
                op for op in graph.get_operations() if _has_effect(op) and op not in forward_effects
            ]

    return both


def _captured(concrete: Any, given: int) -> dict[str, Any]:
    pairs = zip(concrete.inputs[given:], concrete.captured_inputs, strict=True)
    return {inner.name: outer for inner, outer in pairs}


# The position of a microbatch in its batch: the number of rows of the microbatch, the number of
# rows of the batch, the index of the microbatch's first row in the batch, and whether the
# microbatch is the last one that passes through the stage.
MICROBATCH_POSITION = (*(tf.TensorSpec([], tf.int32),) * 3, tf.TensorSpec([], tf.bool))


def trace_for_microbatches(
    forward: Callable[..., Forward],
    inputs: Sequence[ValueSpec],
    differentiable: Sequence[bool],
    outputs: Callable[[], tuple[Sequence[ValueSpec | None], Sequence[ValueSpec]]],
    variables: Sequence[Any],
    layouts_of_variables: Callable[[], Mapping[int, Layout]],
    own_state: Sequence[Any],
    *,
    backward: bool,
) -> Trace:
    """Traces the passes of a stage for the whole batch, and partitions them for a microbatch.

    So each microbatch computes its part of the results for the whole batch.

    Args:
        forward: the forward pass for all rows of the batch, as a function that takes one tensor for
            each of `inputs`.
        inputs: the specs of the inputs.
        differentiable: for each input, whether to compute its gradient.
        outputs: a function that is called after `forward` has been traced. It returns the specs of
            `Forward.outputs`, with None for a contribution to the loss, and the specs of
            `Forward.others`.
        variables: the variables for which to compute gradients.
        layouts_of_variables: a function that returns the layouts of variables over the workers,
            by the `id` of a variable's resource.
        own_state: the moving statistics that each microbatch updates from its own rows.
        backward: whether to trace the backward pass.

    Returns:
        The trace of the passes of one microbatch. It takes `inputs` for the rows of the microbatch,
        followed by a tensor for each spec in `MICROBATCH_POSITION`.

    Raises:
        UnsupportedError: a layer needs the rows of other microbatches.
    """
    whole = _WholeTrace(forward, inputs, differentiable, variables, backward=backward)
    of_outputs, of_others = outputs()
    whole.analyze(of_outputs, of_others, layouts_of_variables(), own_state)
    return whole.trace_of_microbatch()


class _WholeTrace:
    """The passes of a stage, traced for all rows of the batch.

    Args:
        forward: as for `trace_for_microbatches`.
        inputs: as for `trace_for_microbatches`.
        differentiable: as for `trace_for_microbatches`.
        variables: as for `trace_for_microbatches`.
        backward: as for `trace_for_microbatches`.
    """

    def __init__(
        self,
        forward: Callable[..., Forward],
        inputs: Sequence[ValueSpec],
        differentiable: Sequence[bool],
        variables: Sequence[Any],
        *,
        backward: bool,
    ) -> None:
        self._inputs = list(inputs)
        self._differentiable = [wanted and backward for wanted in differentiable]
        self._variables = variables
        made: dict[str, Any] = {}
        both = _both(forward, differentiable, variables, made, backward=backward)

        def traced(*tensors: tf.Tensor) -> list[tf.Tensor]:
            with GlobalStep(own_statistics=True, assigns_own_statistics=True):
                both(*tensors)
            result: Forward = made["result"]
            gradients = [g for some in made.get("gradients", ()) for g in some]
            return [tf.identity(t) for t in (*result.outputs, *result.others, *_tensors(gradients))]

        self._graph = trace_into_graph("stage", traced, tuple(spec.spec for spec in inputs))
        self._result: Forward = made["result"]
        self._effects = made["effects"]
        self._backward_effects = made.get("backward effects", [])
        self._seeds: list[tf.Tensor] = made.get("seeds", [])
        self._of_inputs, self._of_steps, self._of_variables = made.get("gradients", ([], [], []))
        self._captures = list(self._graph.captures)

    def analyze(
        self,
        of_outputs: Sequence[ValueSpec | None],
        of_others: Sequence[ValueSpec],
        layouts: Mapping[int, Layout],
        own_state: Sequence[Any],
    ) -> None:
        """Determines how a microbatch computes its part of each operation.

        Args:
            of_outputs: the specs of `Forward.outputs`, with None for a contribution to the loss.
            of_others: the specs of `Forward.others`.
            layouts: the layouts of variables over the workers, by the `id` of a variable's
                resource.
            own_state: the moving statistics that each microbatch updates from its own rows.

        Raises:
            UnsupportedError: a layer needs the rows of other microbatches.
        """
        batch = Symbol()
        graph = self._graph
        values = [spec.value(batch) for spec in self._inputs]
        values += self._of_captures(layouts, own_state)
        ends = [ZEROED_SUM if s is None else s.value(batch).layout for s in of_outputs]
        for tensor, spec in zip(self._seeds, of_outputs, strict=False):
            known = Value(WHOLE, dims_of(tensor)) if spec is None else spec.value(batch)
            if spec is not None and known.layout.kind == "whole":
                known = dataclasses.replace(known, layout=ZEROED_SUM)
            values.append(known)
            graph.inputs.append(tensor)
        self._analysis = Analysis(graph, values, batch)
        self._layouts = [*ends, *(spec.value(batch).layout for spec in of_others)]
        rest = iter(self._analysis.outputs[len(self._layouts) :])
        self._layouts += self._of_gradients([value.layout for value in rest], batch)
        _check_apart(self._analysis, self._layouts)

    def _of_captures(
        self, layouts: Mapping[int, Layout], own_state: Sequence[Any]
    ) -> Iterator[Value]:
        written = {id(tensor) for tensor, _ in writes(self._graph.get_operations())}
        own = {id(_handle(v)) for v in own_state}
        trained = {id(_handle(v)) for v in self._variables}
        # Pairs of resource and dtype, for variables such as seeds. Every microbatch would change
        # them in the same way, so only the last microbatch may change them.
        self._saved: list[tuple[Any, Any]] = []
        for outer, inner in self._captures:
            layout = layouts.get(id(outer), WHOLE)
            if id(inner) in written and id(outer) in own:
                layout = PER_WORKER
            elif id(inner) in written and layout == WHOLE and id(outer) not in trained:
                dtype = element_type(inner)
                self._saved += [] if dtype is None else [(outer, dtype)]
            yield Value(layout, dims_of(inner))

    def _of_gradients(self, known: Sequence[Layout], batch: Symbol) -> list[Layout]:
        """Returns the layouts in which a microbatch must compute its part of the gradients.

        Args:
            known: the layouts of the gradients' tensors according to the analysis.
            batch: the symbol for the number of rows of the batch.
        """
        found: list[Layout] = []
        at = iter(known)
        wanted = zip(self._inputs, self._differentiable, strict=True)
        for gradient, spec in zip(self._of_inputs, [s for s, w in wanted if w], strict=True):
            own = [next(at) for _ in _tensors([gradient])]
            layout = spec.value(batch).layout
            layout = layout if layout.kind == "rows" else ZEROED_SUM
            found += _of_slices(own) if len(own) > 1 else [layout for _ in own]
        found += [next(at) for _ in _tensors(self._of_steps)]
        for gradient in self._of_variables:
            own = [next(at) for _ in _tensors([gradient])]
            found += _of_slices(own) if len(own) > 1 else [ZEROED_SUM for _ in own]
        return found

    def trace_of_microbatch(self) -> Trace:
        """Traces the passes of one microbatch; `analyze` must be called first."""
        made: dict[str, Any] = {}
        count = len(self._inputs)

        def microbatch(*tensors: tf.Tensor) -> list[tf.Tensor]:
            before = [(outer, _read(outer, dtype)) for outer, dtype in self._saved]
            own, total, first, is_last = tensors[count:]
            leads = tf.equal(first, 0) & (own > 0)
            share = RowShare(own, total, first, None, leads, leads)
            partition = Partition(self._analysis, WorkerEmitter(share, NoCommunication()))
            made["seeds"] = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in self._seeds]
            outside = [outer for outer, _ in self._captures]
            given = [*tensors[:count], *outside, *made["seeds"]]
            made["results"] = partition.add(given, self._layouts)
            made["effects"] = [op for one in self._effects for op in partition.made(one)]
            made["backward effects"] = [
                op for one in self._backward_effects for op in partition.made(one)
            ]
            # Every microbatch except the last one restores these variables, so that all
            # microbatches start with the same values, and the step changes the values once.
            made["effects"] += [
                tf.raw_ops.AssignVariableOp(
                    resource=outer, value=tf.where(is_last, _read(outer, value.dtype), value)
                )
                for outer, value in before
            ]
            return [tf.identity(t) for t in made["results"][: len(self._result.outputs)]]

        specs = [*(spec.spec for spec in self._inputs), *MICROBATCH_POSITION]
        concrete = tf.function(microbatch, autograph=False).get_concrete_function(*specs)
        results = iter(made["results"])
        outputs = [next(results) for _ in self._result.outputs]
        others = [next(results) for _ in self._result.others]
        of_inputs, of_steps, of_variables = (
            [_like(gradient, results) for gradient in gradients]
            for gradients in (self._of_inputs, self._of_steps, self._of_variables)
        )
        rest = iter(of_inputs)
        return Trace(
            graph=concrete.graph,
            captured=_captured(concrete, len(specs)),
            inputs=list(concrete.inputs[: len(specs)]),
            outputs=outputs,
            others=others,
            seeds=made["seeds"],
            input_gradients=[
                *(next(rest) if wanted else None for wanted in self._differentiable),
                *(None for _ in MICROBATCH_POSITION),
            ],
            step_gradients=[g for g in of_steps if g is not None],
            variable_gradients=of_variables,
            effects=made["effects"],
            backward_effects=made["backward effects"],
        )


def _tensors(gradients: Sequence[Any]) -> list[tf.Tensor]:
    present = [gradient for gradient in gradients if gradient is not None]
    return list(tf.nest.flatten(present, expand_composites=True))


def _like(gradient: Any, tensors: Iterator[tf.Tensor]) -> Any:
    """Packs the next tensors into the structure of a gradient.

    Args:
        gradient: a tensor, `tf.IndexedSlices` or None.
        tensors: the tensors, from which as many as necessary are taken.
    """
    if gradient is None:
        return None
    return tf.nest.map_structure(lambda _: next(tensors), gradient, expand_composites=True)


def _of_slices(known: Sequence[Layout]) -> list[Layout]:
    """Returns the layouts in which a microbatch must compute the tensors of `tf.IndexedSlices`."""
    values, indices, *rest = known
    of_rows = next((one for one in (values, indices) if one.kind in ("rows", "per_worker")), None)
    first = [of_rows, of_rows] if of_rows is not None else [ZEROED_SUM, WHOLE]
    return [*first, *(WHOLE for _ in rest)]


def _check_apart(analysis: Analysis, wanted: Sequence[Layout]) -> None:
    """Raises UnsupportedError if an operation needs the rows of other microbatches."""
    for _, op in analysis.communicated(wanted):
        raise UnsupportedError(
            "A layer in a stage of a pipeline must treat the rows of a batch independently, since "
            f"it receives them in microbatches. Received: {op.name!r} ({where(op)}), which needs "
            "all rows. Compute it in the loss or a metric, or use "
            "tfdist.MultiWorkerMirroredStrategy."
        )


def _handle(variable: Any) -> Any:
    """Returns the resource of this replica's copy of a `tf.Variable`."""
    return (copy_here(variable) if hasattr(variable, "values") else variable).handle


def _read(resource: Any, dtype: Any) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=resource, dtype=dtype)


class NoCommunication:
    """Raises an error if a microbatch communicates, since it cannot access other microbatches."""

    scatters = False

    def reduce(self, tensors: Sequence[tf.Tensor], reductions: Sequence[str]) -> list[tf.Tensor]:
        raise AssertionError(f"A microbatch reduces {tensors}.")

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        raise AssertionError(f"A microbatch gathers {tensors}.")

    def scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        raise AssertionError(f"A microbatch scatters {tensors}.")

    def awaits_rows(self, values: Sequence[tf.Tensor]) -> None:
        pass

    def begin(self) -> None:
        raise AssertionError("A microbatch communicates.")


def writes(operations: Iterable[tf.Operation]) -> list[tuple[tf.Tensor, tf.Operation]]:
    """Returns pairs of a resource and an operation that may write the resource."""
    return [
        (tensor, op)
        for op in operations
        for tensor in op.inputs
        if tensor.dtype == tf.resource and op.type not in _READ
    ]


_READ = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "Placeholder")


def _has_effect(op: tf.Operation) -> bool:
    return op.op_def is not None and op.op_def.is_stateful and op.type not in _READ
