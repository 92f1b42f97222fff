"""Rules for random numbers, variables, the program's collectives, effects, and workers' own values.

A program can mark the beginning and the end of a computation on each worker's own values, which
have the layout "per_worker". Operations between these marks are copied unchanged.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.global_view.decision import Call, Decision, Value, merged
from tfdist._src.global_view.layout import PER_WORKER, WHOLE, ZEROED_SUM, Dim, Layout, partial, rows
from tfdist._src.global_view.rules import table


def border(call: Call) -> Decision | None:
    """Returns the decision for an operation with a mark from `_BORDERS`; None for all others."""
    marks = call.op.node_def.attr
    for mark, decide in _BORDERS.items():
        if mark in marks:
            return decide(call)
    return None


def _enter(call: Call) -> Decision:
    """Turns rows, or a whole value, into each worker's own value."""
    own = call.layouts[0]
    wanted = _outside(call, table.PER_WORKER_BEGIN) if len(call.values) > 1 else WHOLE
    is_there = (
        own.kind == "per_worker"
        or own == wanted
        or (table.is_whole(own) and table.is_whole(wanted))
    )
    inputs: list[Layout | None] = [None if is_there else wanted]
    inputs += [None] * (len(call.values) - 1)
    values = [Value(PER_WORKER), *call.values[1:]]
    return Decision(inputs, [v.layout for v in values], values=values, emit=pass_all)


def _leave(call: Call) -> Decision:
    """Turns each worker's own value into the worker's rows, or into one value for all workers."""
    own, like = call.layouts[0], call.values[1]
    if like.layout.kind == "per_worker":
        layout = PER_WORKER  # This computation is nested in another one on workers' own values.
    else:
        layout = _outside(call, table.PER_WORKER_END)
    is_there = own.kind == "per_worker" or own == layout
    values = [Value(layout, like.dims), like]
    inputs = [None if is_there else layout, None]
    return Decision(inputs, [v.layout for v in values], values=values, emit=pass_all)


def _outside(call: Call, mark: str) -> Layout:
    """Returns the layout of a value before the beginning or after the end of the computation.

    The second operand has the same rows as the value. The result is the layout of this operand if
    the axis of its rows may be cut, else `WHOLE`.
    """
    like = call.layouts[1]
    return like if like.kind == "rows" and like.axis in call.attr(mark) else WHOLE


def pass_all(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Returns the operands unchanged."""
    return list(inputs)


def _sum(call: Call) -> Decision:
    """Turns the workers' own values into the terms of a sum."""
    if call.layouts[0].kind != "per_worker":
        return Decision([None if call.layouts[0] == ZEROED_SUM else ZEROED_SUM], [ZEROED_SUM])
    return call.all(ZEROED_SUM, emit=zero_without_rows)


def zero_without_rows(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Returns a worker's own value, or zeros if the worker has no rows."""
    return [
        emitter.neutral_without_rows(inputs[0])
        if call.layouts[0].kind == "per_worker"
        else inputs[0]
    ]


def _average(call: Call) -> Decision:
    """Turns the workers' own values into the terms of their mean, weighted by numbers of rows."""
    if call.layouts[0].kind != "per_worker":
        return call.all(call.layouts[0], emit=pass_all)
    return call.all(ZEROED_SUM, emit=weigh)


def weigh(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Multiplies a worker's own value by the worker's fraction of all rows."""
    return [emitter.neutral_without_rows(inputs[0] * emitter.fraction(inputs[0].dtype))]


def _stack(call: Call) -> Decision:
    """Stacks the workers' own values along their first axis, which has size one."""
    if call.layouts[0].kind != "per_worker":
        return call.all(call.layouts[0], emit=pass_all)
    return call.all(partial("stack"))


_BORDERS = {
    table.PER_WORKER_BEGIN: _enter,
    table.PER_WORKER_END: _leave,
    table.SUM: _sum,
    table.AVERAGE: _average,
    table.STACK: _stack,
}


# Random numbers.

_RANDOM = table.names(
    "StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessRandomUniformIntV2 "
    "StatelessRandomUniformFullIntV2"
)


@table.rule(*_RANDOM)
def random_numbers(call: Call) -> Decision | None:
    """Draws random numbers; each row gets the same numbers, regardless of the number of workers."""
    shape = call.content(0)
    if not all(map(table.is_whole, call.layouts)) or shape is None or shape.ndim != 1:
        return None
    dims = merged(call.op.outputs[0], list(shape))
    algorithm = tf.get_static_value(call.op.inputs[3])
    unit = Dim(1, (call.batch,))
    if algorithm in _PHILOX and len(dims) and dims[0].has(call.batch):
        inner = dims[0].divided_by(unit)
        if inner is not None and not any(d.has(call.batch) for d in dims[1:]):
            result = rows(0, inner=inner)
            return call.all(result, dims=[dims], local_shapes={0: 0}, emit=skip_ahead)
    return call.all(WHOLE, dims=[dims])


# Philox, and "the best algorithm for the device", which is also Philox on CPUs and GPUs.
_PHILOX = (1, 3)
# Each increment of the counter of Philox yields 128 bits: four 32-bit or two 64-bit numbers.
_PER_COUNT = {tf.float64: 2, tf.int64: 2, tf.uint64: 2}


def skip_ahead(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Draws the numbers of this worker's rows, and skips the numbers of earlier rows (Philox)."""
    shape, key, counter, *rest = inputs
    dtype = call.op.outputs[0].dtype
    count = tf.reduce_prod(tf.cast(shape, tf.int64))
    skipped = emitter.first_row(tf.int64) * (count // emitter.own_rows(tf.int64))
    block = _PER_COUNT.get(dtype, 4)
    counter += tf.cast(tf.stack([skipped // block, 0]), tf.uint64)
    # Draws a few more numbers than needed, since the first block may begin before this worker's
    # rows. With XLA, the number of drawn numbers must not depend on the index of the first row.
    long = tf.reshape(tf.cast(count + block - 1, shape.dtype), [1])
    (numbers,) = emitter.copy(call.op, [long, key, counter, *rest])
    own = tf.slice(numbers, [skipped % block], [count])
    return [tf.reshape(own, shape)]


_STATEFUL_RANDOM = table.names(
    "RandomUniform RandomStandardNormal RandomUniformInt TruncatedNormal RandomShuffle RandomCrop "
    "Multinomial RandomGamma RandomPoisson RandomPoissonV2 RiscRandomUniform "
    "ParameterizedTruncatedNormal AllCandidateSampler FixedUnigramCandidateSampler "
    "LearnedUnigramCandidateSampler LogUniformCandidateSampler ThreadUnsafeUnigramCandidateSampler "
    "UniformCandidateSampler FractionalAvgPool FractionalMaxPool SampleDistortedBoundingBox "
    "SampleDistortedBoundingBoxV2"
)


@table.rule(*_STATEFUL_RANDOM)
def stateful_random_numbers(call: Call) -> Decision | None:
    """Draws random numbers for the whole batch: with a seed on all workers, else on one worker."""
    if call.attr("seed") or call.attr("seed2"):
        return None
    return _by_one(call, "numbers are drawn for the whole batch")


@table.rule("EagerPyFunc", "NonDeterministicInts", "PyFunc", "Skipgram", "Timestamp")
def of_one_worker(call: Call) -> Decision | None:
    """Computes results that may differ between workers, so all workers use one worker's results."""
    return _by_one(call, "no rule")


def _by_one(call: Call, reason: str) -> Decision:
    """Returns the decision to use one worker's results on all workers.

    Results that are not numbers cannot be communicated, so each process uses its own.
    """
    decision = call.whole(reason)
    numeric = [t.dtype.is_floating or t.dtype.is_integer for t in call.op.outputs]
    decision.outputs = [ZEROED_SUM if sums else WHOLE for sums in numeric]
    decision.emit = by_the_first
    return decision


def by_the_first(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Returns this worker's terms of sums that are equal to one worker's results."""
    results = zip(emitter.once(call.op, inputs), call.decision.outputs, strict=True)
    return [emitter.contribution_of_whole(x) if layout.is_sum else x for x, layout in results]


# Variables.


@table.rule("ReadVariableOp", per_worker=True)
def read_variable(call: Call) -> Decision | None:
    """Reads a variable; the value has the layout of the variable."""
    return call.all(call.layouts[0])


@table.rule("VarIsInitializedOp", "VariableShape", "DisableCopyOnRead", per_worker=True)
def about_variable(call: Call) -> Decision | None:
    """Queries a variable without changing its value."""
    return call.all(WHOLE)


@table.rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", per_worker=True)
def assign_variable(call: Call) -> Decision | None:
    """Writes a variable."""
    variable, value = call.layouts
    if variable.kind == "per_worker":
        return call.all(PER_WORKER)
    if variable.kind == "partial":
        return Decision([None, None if value == variable else variable], [])
    return Decision([None, None if table.is_whole(value) else WHOLE], [])


@table.rule(
    "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd", "ResourceScatterNdSub"
)
def scatter_add_variable(call: Call) -> Decision | None:
    """Adds to elements of a variable."""
    variable, indices, updates = call.layouts
    if variable.kind != "partial":
        return None
    # The indices and the updates have the same leading axes.
    are_rows = updates.kind == "rows" and updates.axis == 0
    are_rows = are_rows and (table.is_whole(indices) or indices == updates)
    if are_rows and (call.rank(1) or 0) > ("Nd" in call.type):
        inputs = [None, None if indices == updates else updates, None]
        return Decision(inputs, [], emit=scatter_of_own_rows)
    return Decision([None, None if table.is_whole(indices) else WHOLE, ZEROED_SUM], [])


def scatter_of_own_rows(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds this worker's rows of the updates to this worker's part of a variable."""
    variable, indices, updates = inputs
    return emitter.copy(call.op, [variable, indices, emitter.neutral_without_rows(updates)])


@table.rule("ResourceScatterUpdate", "ResourceScatterNdUpdate")
def scatter_variable(call: Call) -> Decision | None:
    """Sets elements of a variable."""
    if call.layouts[0].kind != "partial":
        return None
    return Decision([None, None if table.is_whole(call.layouts[1]) else WHOLE, ZEROED_SUM], [])


@table.rule("ResourceStridedSliceAssign")
def assign_slice(call: Call) -> Decision | None:
    """Sets a slice of a variable."""
    if call.layouts[0].kind != "partial":
        return None
    return Decision(
        [None, *(None if table.is_whole(v) else WHOLE for v in call.layouts[1:4]), ZEROED_SUM], []
    )


@table.rule("ResourceScatterMul", "ResourceScatterDiv")
def scale_variable(call: Call) -> Decision | None:
    """Multiplies elements of a variable."""
    if call.layouts[0].kind != "partial":
        return None
    return Decision([None, *(None if table.is_whole(v) else WHOLE for v in call.layouts[1:])], [])


_EXTREMES = {
    "ResourceScatterMax": tf.tensor_scatter_nd_max,
    "ResourceScatterMin": tf.tensor_scatter_nd_min,
    "ResourceScatterNdMax": tf.tensor_scatter_nd_max,
    "ResourceScatterNdMin": tf.tensor_scatter_nd_min,
}


@table.rule(*_EXTREMES)
def scatter_extremes(call: Call) -> Decision | None:
    """Replaces elements of a variable by the maximum or minimum of the element and an update."""
    if call.layouts[0].kind != "partial":
        return None
    inputs = [None, *(None if table.is_whole(v) else WHOLE for v in call.layouts[1:])]
    return Decision(inputs, [], emit=scatter_into_the_sum)


def scatter_into_the_sum(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Applies updates to the sum of all workers' parts of a variable.

    Afterwards, the first worker's part is the whole sum, and the parts of all others are zero.
    """
    variable, indices, updates = inputs
    part = tf.raw_ops.ReadVariableOp(resource=variable, dtype=updates.dtype)
    total = emitter.sum_now(part)
    if "Nd" not in call.op.type:
        updates = tf.broadcast_to(
            updates, tf.concat([tf.shape(indices), tf.shape(total)[1:]], axis=0)
        )
        indices = indices[..., tf.newaxis]
    changed = _EXTREMES[call.op.type](total, indices, updates)
    own = tf.where(emitter.is_first(), changed, tf.zeros_like(changed))
    emitter.effects = [tf.raw_ops.AssignVariableOp(resource=variable, value=own)]
    return []


# Collectives that the traced program itself contains, for example in its optimizer.


@table.rule(
    "TfdistAllReduce",
    "TfdistCompressedAllReduce",
    "TfdistReduceScatter",
    "CollectiveReduceV2",
    "CollectiveReduceV3",
    per_worker=True,
)
def all_reduce(call: Call) -> Decision | None:
    """Sums partial values, or the workers' own values, over all or some workers."""
    local = call.type == "TfdistReduceScatter" or any(
        call.layouts[i].kind == "per_worker" for i in _reduced_operands(call)
    )
    result = PER_WORKER if local else WHOLE
    inputs: list[Layout | None] = [None] * len(call.layouts)
    for i in _reduced_operands(call):
        inputs[i] = None if call.layouts[i].kind == "per_worker" else ZEROED_SUM
    return Decision(inputs, [result] * len(call.op.outputs))


def _reduced_operands(call: Call) -> list[int]:
    """Returns the indices of the operands that a collective combines across workers.

    The other operands are tokens, keys or seeds.
    """
    if call.type.startswith("Collective"):
        return [0]
    dtypes = [tensor.dtype for tensor in call.op.inputs]
    if call.type == "TfdistCompressedAllReduce":
        return [i for i, dtype in enumerate(dtypes) if dtype.is_floating]
    return [i for i, dtype in enumerate(dtypes) if dtype != tf.resource]


@table.rule("IdentityN", per_worker=True)
def identities(call: Call) -> Decision | None:
    """Returns values unchanged; an attribute may mark the values as terms of sums, or as sums."""
    decision = border(call)
    if decision is not None:
        return decision
    if table.EQUAL in call.op.node_def.attr:
        inputs = [
            None if table.is_whole(v) or v.kind == "per_worker" else WHOLE for v in call.layouts
        ]
        return Decision(inputs, [WHOLE] * len(inputs), emit=as_they_are)
    if table.CONTRIBUTION in call.op.node_def.attr:
        inputs = [None if v.kind == "per_worker" or v.is_sum else ZEROED_SUM for v in call.layouts]
        return Decision(inputs, [PER_WORKER] * len(inputs), emit=contribute)
    return Decision(
        [None] * len(call.values), call.layouts, values=call.values, emit=each_by_itself
    )


def as_they_are(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Returns the values themselves, so that no value waits for the others."""
    return list(inputs)


def contribute(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Returns this worker's terms of sums, which are zeros if the worker has no rows."""
    results = list(inputs)
    which = [i for i, v in enumerate(call.layouts) if v.is_sum and not v.zeroed]
    for i, value in zip(which, emitter.zeros_without_rows([inputs[i] for i in which]), strict=True):
        results[i] = value
    return results


def each_by_itself(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Returns an identity for each value, so that no value waits for the others."""
    return [tf.identity(x) for x in inputs]


@table.rule("TfdistAllGather", "CollectiveGatherV2", per_worker=True)
def all_gather(call: Call) -> Decision | None:
    """Concatenates the parts of all workers along the first axis."""
    (index,) = _reduced_operands(call)
    if call.layouts[index].kind == "per_worker":
        return call.all(PER_WORKER)
    inputs: list[Layout | None] = [None] * len(call.layouts)
    inputs[index] = None if table.is_whole(call.layouts[index]) else WHOLE
    return Decision(inputs, [WHOLE], emit=pass_on)


def pass_on(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Returns the operand instead of gathering it, because it is already whole."""
    return [inputs[0] if call.op.type.startswith("Collective") else inputs[-1]]


@table.rule("TfdistAwait", per_worker=True)
def await_launched(call: Call) -> Decision | None:
    """Waits for collectives."""
    return call.all(PER_WORKER if call.has("per_worker") else WHOLE)


@table.rule(
    "TfdistReady",
    "TfdistSpan",
    "TfdistInput",
    "TfdistStep",
    "TfdistKeep",
    "TfdistPrepares",
    "TfdistConfirms",
    per_worker=True,
)
def mark(call: Call) -> Decision | None:
    """Marks a point in the step, for example for the timeline."""
    return call.all(WHOLE)


@table.rule("TfdistUpdateBegins", per_worker=True)
def update_begins(call: Call) -> Decision | None:
    """Marks the point of the step after which the optimizer updates variables."""
    return call.all(WHOLE)


@table.rule("TfdistGroupShape", per_worker=True)
def group_shape(call: Call) -> Decision | None:
    """Returns this worker's rank and the number of workers."""
    return call.all(PER_WORKER)


# Effects.


@table.rule("Assert")
def assertion(call: Call) -> Decision | None:
    """Checks an assertion, which fails only on workers with rows that violate it."""
    condition = call.layouts[0]
    if condition.kind == "whole":
        return Decision([None] * len(call.values), [])
    if condition.reduction == "all":
        return Decision([None] * len(call.values), [], emit=assert_of_own_rows)
    return None


def assert_of_own_rows(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Asserts a condition on this worker's rows, if the worker has any rows."""
    return emitter.copy(call.op, [emitter.neutral_without_rows(inputs[0], "all"), *inputs[1:]])


@table.rule("NoOp", "Const", "VarHandleOp", "ControlTrigger", "LoopCond")
def nothing(call: Call) -> Decision | None:
    """Handles operations without operands, and `LoopCond`."""
    return call.all(WHOLE)


@table.rule(
    *table.names(
        "Print PrintV2 WriteAudioSummary WriteGraphSummary WriteHistogramSummary WriteImageSummary "
        "WriteRawProtoSummary WriteScalarSummary WriteSummary"
    ),
    per_worker=True,
)
def print_once(call: Call) -> Decision | None:
    """Prints or writes a summary on the first worker only."""
    decision = call.whole("printed")
    decision.inputs = [
        None if v.kind == "per_worker" else wanted
        for v, wanted in zip(call.layouts, decision.inputs, strict=True)
    ]
    decision.emit = on_the_first_worker
    return decision


def on_the_first_worker(emitter: Any, call: Any, inputs: Sequence[Any]) -> Any:
    """Adds an operation that runs only on the first worker, because it has side effects."""
    if call.op.outputs:
        return emitter.copy(call.op, inputs)

    def run() -> tf.Tensor:
        emitter.copy(call.op, inputs)
        return tf.constant(0)

    emitter.effects = [tf.cond(emitter.is_first(), run, lambda: tf.constant(0)).op]
    return []
