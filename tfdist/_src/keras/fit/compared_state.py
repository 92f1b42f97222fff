"""Compares the state that must be equal on all workers, before and during training.

Synchronous steps keep this state equal, but code that runs between the steps, such as a callback,
may assign a variable on one worker only. So in each step, the workers exchange a checksum of the
variables that were assigned since the last step. From time to time, the checksum also covers
samples of all weights. The workers compare the complete state only if the checksums differ.

The strategy is not notified when a variable outside of its scope is assigned. However, the graph of
a step shows which of these variables the step captures. From time to time, the workers compare
samples of their values as well.

Workers without a shared disk, or with separate working directories, may find other files than the
chief. A callback that reads such files may restore a different state on each worker, so the state
is also compared when training begins.
"""

import hashlib
import itertools
import json
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist._src.comm import tokens
from tfdist._src.group import Group
from tfdist._src.internals.graphs import captured_from, variables_read
from tfdist._src.internals.iterators import initial_epoch, set_initial_epoch
from tfdist._src.internals.variables import spec_of_resource
from tfdist._src.keras.fit.callback import Callback
from tfdist._src.keras.fit.step_exchange import last_programs
from tfdist._src.keras.optimizers.applying import optimizers_of, own_state, replicated_variables
from tfdist._src.keras.saving.compression_files import compressor_of
from tfdist._src.keras.saving.files import (
    awaits_admission,
    group_of,
    is_pipeline_model,
    needs_gathering,
)
from tfdist._src.log import logger
from tfdist._src.strategy.commit_point import READS
from tfdist._src.strategy.extended import extended_of
from tfdist._src.strategy.variables import ReplicatedMirroredVariable, assignments, take_assigned
from tfdist._src.xla.program import called_by
from tfdist.errors import ProgramMismatchError, ReplicaMismatchError, UnsupportedError


class OuterVariable:
    """A variable outside of the strategy that a step captures, identified by its resource handle.

    Args:
        resource: the variable's resource handle. The step keeps it alive, but this object does not.
        path: the variable's name.
        spec: the type and shape of the variable's value.
    """

    def __init__(self, resource: tf.Tensor, path: str, spec: tf.TensorSpec) -> None:
        self._resource = weakref.ref(resource)
        self.path, self._spec = path, spec

    def __repr__(self) -> str:
        return f"{self.path} {self._spec.dtype.name}{self._spec.shape}"

    @property
    def exists(self) -> bool:
        """Whether there still is a step that captures the variable."""
        return self._resource() is not None

    @property
    def value(self) -> tf.Tensor:
        """The variable's value.

        Raises:
            tf.errors.FailedPreconditionError: the variable has no value.
        """
        resource = self._resource()
        with tf.init_scope():
            value = tf.raw_ops.ReadVariableOp(resource=resource, dtype=self._spec.dtype)
            return tf.ensure_shape(value, self._spec.shape)


class OuterState:
    """The variables that a model's steps read, but that do not belong to the model's strategy.

    Attributes:
        traces: the number of steps traced so far.
    """

    def __init__(self) -> None:
        self._found: dict[int, OuterVariable] = {}
        self.traces = 0

    def note(self, graph: Any, outputs: Sequence[Any], own: set[int]) -> None:
        """Adds the variables that a newly traced step captures.

        Args:
            graph: the graph of the step.
            outputs: the results of the graph.
            own: the `id`s of the resource handles that belong to the strategy.
        """
        self.traces += 1
        names = {id(v.handle): v.name for v in variables_read(graph)}
        results = {id(output) for output in outputs}
        for outside, inside in graph.captures:
            resource = captured_from(outside)
            spec = None if tokens.is_token(resource) else spec_of_resource(resource)
            if spec is None or id(resource) in own or not _counts(inside, results):
                continue
            name = names.get(id(resource), "").removesuffix(":0") or "without a name"
            self._found[id(resource)] = OuterVariable(resource, name, spec)

    def variables(self) -> dict[str, OuterVariable]:
        """Returns the variables that have a value, keyed by names.

        Each name contains a checksum of the paths and types of all these variables. So the names on
        two workers match only if all these variables match.
        """
        self._found = {key: one for key, one in self._found.items() if one.exists}
        readable = [one for one in self._found.values() if _is_readable(one)]
        alike = zlib.crc32(repr(readable).encode())
        return {f"outside {i} of {alike}": one for i, one in enumerate(readable)}


def outer_state_of(model: keras.Model) -> OuterState:
    """Returns the record of the variables outside of the strategy that a model's steps read."""
    return _known.setdefault(model, OuterState())


_known: weakref.WeakKeyDictionary[Any, OuterState] = weakref.WeakKeyDictionary()


def _is_readable(variable: OuterVariable) -> bool:
    try:
        return variable.value is not None
    except tf.errors.FailedPreconditionError:
        return False


def _counts(resource: tf.Tensor, results: set[int]) -> bool:
    """Whether a variable's value affects the step's results or other state.

    If not, the value may differ between workers. For example, the variable may be a counter that is
    only printed, or a metric that only one worker reads.

    Args:
        resource: the placeholder of the variable's resource handle in the graph.
        results: the `id`s of the graph's results.
    """
    pending = list(resource.consumers())
    seen: set[Any] = set()
    while pending:
        op = pending.pop()
        if op in seen:
            continue
        seen.add(op)
        if op.type not in READS and any(_is_other(t, resource, op) for t in op.inputs):
            return True
        if any(id(output) in results for output in op.outputs):
            return True
        pending += [consumer for output in op.outputs for consumer in output.consumers()]
    return False


def _is_other(tensor: tf.Tensor, resource: tf.Tensor, op: Any) -> bool:
    """Whether an input of an operation is the resource handle of other state that it may write."""
    if tensor.dtype != tf.resource or tensor is resource:
        return False
    # The input of a function call or a conditional counts only if it is a variable, because it may
    # also be a summary writer.
    return not called_by(op.node_def) or spec_of_resource(tensor) is not None


# The workers compare samples of all weights once in this number of steps.
_STEPS = 256
# The approximate number of elements in the sample of a weight, and in the sample of a variable that
# was assigned between steps.
_SAMPLED, _ASSIGNED = 32, 2**14


# The optimizers of all models whose state has been compared.
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


class StateComparison:
    """Computes a checksum of a model's state before each step, and compares the state on demand.

    Args:
        model: a model under a strategy that holds the whole model on each replica.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._call: Any = None
        self._steps = 0
        self._assigned: set[int] = set()
        self._data: Callable[[], Any] = lambda: None
        self._traces = self._outer_steps = 0
        _optimizers.update(optimizers_of(model).values())

    def number(self, call: Any, steps: int, data: Any = None) -> int:
        """Returns a 30-bit checksum of the state before a step, which must be equal on all workers.

        Args:
            call: identifies the running call of `fit`. Before the first step of each call, the
                checksum also covers samples of all weights. None for other calls than `fit`.
            steps: the number of steps that run before this method is called again.
            data: identifies an epoch of `fit`, or a pass of `evaluate` or `predict`. Before its
                first step, the checksum also covers the variables outside of the scope. None for a
                call on a single batch, such as `train_on_batch`.
        """
        due = [*self._due(call, steps), *self._outer_due(steps, data)]
        return _number(self._take_assigned(), due)

    def _outer_due(self, steps: int, data: Any) -> list[OuterVariable]:
        """Returns the variables outside of the scope that the next checksum must cover."""
        due: list[OuterVariable] = []
        outer = outer_state_of(self._model)
        begins = data is not None and data is not self._data()
        if begins or outer.traces != self._traces or self._outer_steps >= _STEPS:
            self._traces, self._outer_steps = outer.traces, 0
            self._data = weakref.ref(data) if begins else self._data
            due = list(outer.variables().values())
        self._outer_steps += steps
        return due

    def _take_assigned(self) -> list[Any]:
        """Returns the variables that were assigned since this method was last called."""
        assigned = take_assigned(self._model.distribute_strategy)
        kept = self._kept() if assigned else ()
        assigned = [v for v in assigned if id(v) not in kept]
        self._assigned = set(map(id, assigned))
        return assigned

    def _due(self, call: Any, steps: int) -> list[Any]:
        """Returns the weights and optimizer variables that the next checksum must sample."""
        due: list[Any] = []
        if call is not None and (call is not self._call or self._steps >= _STEPS):
            self._call, self._steps = call, 0
            due = list(replicated_variables(self._model).values())
        self._steps += steps
        return due

    def check(self) -> None:
        """Compares the complete state of all workers. All workers must call this method.

        Raises:
            ReplicaMismatchError: a variable differs between workers.
        """
        if found := self.difference():
            raise _mismatch(found)
        group = extended_of(self._model.distribute_strategy).group
        found = different_copies(group, outer_state_of(self._model).variables())
        if found:
            raise ReplicaMismatchError(
                "The workers have different values of a variable that the model's step reads and "
                f"that was created outside of the strategy's scope: {found}. Assign the same value "
                "on all workers, or create it in the scope."
            )

    def difference(self) -> str:
        """Describes the first variable that differs between workers; "" if no variable differs.

        All workers must call this method.
        """
        variables = self.variables()
        assigned = [n for n, v in variables.items() if id(_distributed(v)) in self._assigned]
        group = extended_of(self._model.distribute_strategy).group
        return different_copies(group, variables, first=assigned)

    def _kept(self) -> set[int]:
        """Returns the `id`s of the variables that may differ between workers.

        Code between the steps may also have assigned variables of other models.
        """
        kept = set()
        _optimizers.update(optimizers_of(self._model).values())
        for optimizer in list(_optimizers):
            own = own_state(optimizer)
            kept |= {id(v.value) for v in optimizer.variables if id(v) in own}
        compressor = extended_of(self._model.distribute_strategy).compressor
        return kept | set(map(id, compressor.variables if compressor is not None else ()))

    def variables(self) -> dict[str, Any]:
        """Returns the variables that must be equal on all replicas, keyed by matching names."""
        found = replicated_variables(self._model)
        kept = self._kept() | {id(v.value) for v in (*found.values(), *self._model.variables)}
        for variable in extended_of(self._model.distribute_strategy).variables:
            if isinstance(variable, ReplicatedMirroredVariable) and id(variable) not in kept:
                found.setdefault(f"variable {variable.name}", variable)
        return found


class StageComparison(StateComparison):
    """Compares the state of a model that is split into stages on different workers.

    Scalar variables of optimizers, such as the learning rate, must be equal on all workers. All
    other variables must be equal on the workers that hold the same stages.

    Args:
        model: a `PipelineModel`.
    """

    def numbers(self, call: Any, steps: int) -> tuple[int, int]:
        """Returns a checksum of the optimizers' scalars, and a checksum of the stages' variables.

        Args:
            call: as for `number`.
            steps: as for `number`.
        """
        assigned = self._take_assigned()
        scalars = self._scalars() if assigned else set()
        both = (
            [v for v in assigned if id(v) in scalars],
            [v for v in assigned if id(v) not in scalars],
        )
        return _number(both[0]), _number(both[1], self._due(call, steps))

    def check(self) -> None:
        if found := self.difference():
            raise _mismatch(found)

    def difference(self) -> str:
        group = extended_of(self._model.distribute_strategy).group
        scalars, variables = self._scalars(), self.variables()
        both: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        stages = f"stages of pipeline rank {self._model.distribute_strategy.pipeline_rank}"
        for name, variable in variables.items():
            if id(_distributed(variable)) in scalars:
                both[0][name] = variable
            else:
                both[1][f"{stages}: {name}"] = variable
        first = [n for n, v in both[0].items() if id(_distributed(v)) in self._assigned]
        # If a worker has no weights to train, its optimizer does not count steps. So scalars are
        # compared only if they were assigned between steps.
        found = different_copies(group, both[0], first=first, others=False)
        return found or different_copies(group, both[1])

    def _scalars(self) -> set[int]:
        """Returns the `id`s of the optimizers' scalar variables."""
        optimizers = optimizers_of(self._model).values()
        return {
            id(_distributed(v)) for one in optimizers for v in one.variables if not v.shape.rank
        }


def _mismatch(found: str) -> ReplicaMismatchError:
    return ReplicaMismatchError(
        f"The workers no longer have the same state: {found}. Steps keep it equal, so code "
        "between them, such as a callback, has changed it on one worker only. Have all "
        "workers run the same code with the same values."
    )


def _number(assigned: Sequence[Any], sampled: Sequence[Any] = ()) -> int:
    total = 0
    for variable in assigned:
        total = zlib.crc32(_sample(variable.values[0], _ASSIGNED), total)
    for variable in sampled:
        total = zlib.crc32(_sample(_copies(variable)[0], _SAMPLED), total)
    return total & 0x3FFFFFFF


def check_programs(group: Group) -> None:
    """Compares the steps that the workers have just traced. All workers must call this function.

    Raises:
        ProgramMismatchError: the workers have traced different steps. The message names the first
            operation that differs.
    """
    mine = {traced_for: program.values for traced_for, program in last_programs.items()}
    everyone = [json.loads(text) for text in group.exchange("programs", json.dumps(mine))]
    for traced_for, first in everyone[0].items():
        for rank, found in enumerate(everyone):
            if found.get(traced_for, first) != first:
                values = [first, found[traced_for]]
                raise ProgramMismatchError(
                    "The workers run different programs in their steps: "
                    f"{_first_difference(group, traced_for, rank, values)}. Run the same code on "
                    "all workers, and sort what you loop over if it is a `set`."
                )


def _first_difference(group: Group, traced_for: str, other: int, values: list[Any]) -> str:
    """Describes the first difference between the steps of the chief and of another worker.

    All workers must call this function.

    Args:
        group: the workers.
        traced_for: the conditions under which both steps were traced; see `TracedProgram.note`.
        other: the other worker's rank.
        values: the fingerprints of the chief's step and of the other worker's step.
    """
    program = last_programs.get(traced_for)
    operations = [] if program is None else program.operations
    texts = group.exchange("operations", json.dumps(operations))
    chiefs, others = (json.loads(texts[rank]) for rank in (0, other))
    # For each of the two steps, the index of the first operation that the other step does not
    # contain.
    only = [
        next((i for i, one in enumerate(own) if one not in theirs), None)
        for own, theirs in ((chiefs, set(others)), (others, set(chiefs)))
    ]
    place = only[min(1, group.topology.rank)]
    here = ""
    if program is not None and place is not None and place < len(operations):
        here = program.describe_operation(place)
    elif program is not None and only == [None, None]:
        pairs = itertools.zip_longest(*values)
        moved = next(i for i, (one, another) in enumerate(pairs) if one != another)
        here = program.describe_value(moved) if moved < len(program.values) else ""
    described = group.exchange("what differs", here)
    chief, worker = (group.topology.workers[rank] for rank in (0, other))
    if only == [None, None]:
        return f"{worker} reaches {described[other]} where {chief} reaches {described[0]}"
    return (
        f"{worker} computes {described[other] or 'nothing'} where {chief} computes "
        f"{described[0] or 'nothing'}"
    )


def different_copies(
    group: Group, variables: dict[str, Any], *, first: Sequence[str] = (), others: bool = True
) -> str:
    """Compares the copies of variables on all replicas. All workers must call this function.

    Args:
        group: the workers.
        variables: this worker's variables, keyed by names. Variables with the same name on
            different workers must be equal.
        first: the names of the variables to compare first. If they differ, they may be the cause of
            the differences between other variables. The names that the workers pass are combined.
        others: whether to compare also the variables that are not in `first`.

    Returns:
        A description of the first variable that differs; "" if no variable differs.
    """
    mine = {
        name: [getattr(variable, "path", None) or variable.name, *map(_seen, _copies(variable))]
        for name, variable in variables.items()
    }
    texts = group.exchange("state", json.dumps([list(first), mine]))
    everyone = list(map(json.loads, texts))
    found: dict[str, list[_Copy]] = {name: [] for names, _ in everyone for name in names}
    for rank, (_, copies_by_name) in enumerate(everyone):
        for name, (path, *seen) in copies_by_name.items():
            if name not in found and not others:
                continue
            for i, (hashed, value) in enumerate(seen):
                replica = f", replica {i}" if len(seen) > 1 else ""
                copy = _Copy(path, f"worker {rank}{replica}", hashed, value)
                found.setdefault(name, []).append(copy)
    for copies in found.values():
        for copy in copies[1:]:
            if copy.hashed != copies[0].hashed:
                values = f": {copies[0].value} and {copy.value}" if copy.value else ""
                where = f"{copies[0].where} and {copy.where}"
                return f"the variable {copy.path!r} differs between {where}{values}"
    return ""


class _Copy(NamedTuple):
    """A replica's copy of a variable."""

    path: str
    where: str
    hashed: str
    value: str


def _distributed(variable: Any) -> Any:
    return variable if isinstance(variable, tf.Variable) else variable.value


def _copies(variable: Any) -> list[Any]:
    value = _distributed(variable)
    return list(getattr(value, "values", [value]))


def _seen(copy: Any) -> tuple[str, str]:
    array = copy.numpy()
    shown = "" if np.ndim(array) else f"{array:.8g}" if np.isreal(array) else str(array)
    return hashlib.blake2b(_bytes(array), digest_size=8).hexdigest(), shown


def _bytes(array: Any) -> Any:
    array = np.ascontiguousarray(array)
    return repr(array.tolist()).encode() if array.dtype.hasobject else array.view(np.uint8).data


def _sample(copy: Any, most: int) -> Any:
    size = copy.shape.num_elements() or 0
    flat = tf.reshape(copy, [-1])
    return _bytes(flat[:: max(1, size // most)].numpy())


class SynchronizedStart(Callback):
    """Compares the workers' state after all other callbacks have run `on_train_begin`.

    If the callbacks have restored or assigned different states, all workers receive the chief's
    state.

    Attributes:
        first: a callback that must be called before all other callbacks.
    """

    communicates_in = ("on_train_begin",)

    class First(Callback):
        """Notes how many assignments there were before the other callbacks run `on_train_begin`."""

        assignments = 0
        awaits_admission = False

        def on_train_begin(self, logs: Any = None) -> None:
            self.assignments = assignments()
            self.awaits_admission = awaits_admission(self.model)

    def __init__(self) -> None:
        super().__init__()
        self.first = self.First()

    def on_train_begin(self, logs: Any = None) -> None:
        group = group_of(self.model)
        if group is None or self.first.awaits_admission:
            return  # This worker receives the state of the others later.
        changed = assignments() != self.first.assignments
        epoch, updates = initial_epoch(self.model), _updates_of(self.model)
        texts = group.exchange("how training begins", json.dumps([epoch, updates, changed]))
        places = [(epoch, updates) for epoch, updates, _ in map(json.loads, texts)]
        if not any(json.loads(text)[2] for text in texts) and len(set(places)) == 1:
            return
        kind = StageComparison if is_pipeline_model(self.model) else StateComparison
        compared = kind(self.model)
        found = compared.difference()
        if found or len(set(places)) > 1:
            self._share(group, _described(group, places, found), places[0][0], compared)

    def _share(self, group: Group, found: str, epoch: int, compared: StateComparison) -> None:
        """Makes all workers begin with the chief's state.

        Raises:
            UnsupportedError: each worker holds another part of the state, so the chief's state
                cannot replace it.
        """
        extended = extended_of(self.model.distribute_strategy)
        if needs_gathering(self.model) or compressor_of(self.model) is not None:
            raise UnsupportedError(
                "A callback such as BackupAndRestore must find the same files on all workers if "
                f"each keeps a part of the model. Received: {self.model.name!r}, where {found}. "
                "Pass the path of a shared disk, or use tfdist.callbacks.BackupAndRestore."
            )
        if group.topology.is_chief:
            logger.warning(f"{found}. All continue with the state of {group.topology.workers[0]}.")
        set_initial_epoch(self.model, epoch)
        for variable in compared.variables().values():
            value = variable if isinstance(variable, tf.Variable) else variable.value
            variable.assign(extended.workers.broadcast(tf.convert_to_tensor(value.values[0])))


def _updates_of(model: keras.Model) -> int:
    """Returns how often the model's optimizer has updated the weights."""
    optimizer = getattr(model, "optimizer", None)
    return 0 if optimizer is None else int(optimizer.iterations.numpy())


def _described(group: Group, places: list[tuple[int, int]], found: str) -> str:
    other = next((i for i, place in enumerate(places) if place != places[0]), None)
    text = "callbacks have restored different states when the training began"
    if other is not None:
        chief, worker = (
            f"{group.topology.workers[rank]} continues from epoch {epoch} after {updates} updates"
            for rank, (epoch, updates) in ((0, places[0]), (other, places[other]))
        )
        text += f": {chief}, and {worker}"
    return f"{text}{': ' if other is None else ', and '}{found}" if found else text
