"""Reads and restores the state that this worker holds, by names that are the same on all workers.

The state consists of variables, and of the states of callbacks and codecs. The variables include
the states of stateful recurrent layers, and `tf.Variable`s that are attributes of a model or layer
and change in a step.

Names do not depend on the number of workers, nor on the division of the state among them: weights
and slots are numbered as in a single process, and a shard is a range of elements of its slot.
"""

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._src.internals.callbacks import (
    CsvFile,
    attributes_of,
    best_weights_of,
    set_best_weights,
)
from tfdist._src.internals.keras import global_seed_state, sublayers_of
from tfdist._src.internals.optimizer import accumulators, updating_optimizers, wrappers
from tfdist._src.keras.fit.callback import protocol_of
from tfdist._src.keras.fit.metric_state import totals_of
from tfdist._src.keras.optimizers.applying import accumulates_own, optimizers_of
from tfdist._src.keras.saving.compression_files import compressor_of
from tfdist._src.keras.saving.files import is_pipeline_model
from tfdist._src.sharding import FullSlot, FullState, sharded_by
from tfdist._src.snapshots.part_file import Array, StoredArray
from tfdist._src.strategy.extended import extended_of
from tfdist._src.strategy.variables import SummedVariable
from tfdist.errors import UnsupportedError


def untracked_variables(model: keras.Model) -> list[Any]:
    """Finds variables that Keras does not track, in the attributes of the model and its layers.

    An attribute may be a variable, or a list or dict of variables.

    Args:
        model: a compiled and built model.

    Returns:
        Each variable once, in an order that depends only on the program.
    """
    known = {id(variable) for variable in model.variables}
    known |= {id(v) for metric in model.metrics for v in metric.variables}
    known |= {id(v) for optimizer in optimizers_of(model).values() for v in optimizer.variables}
    found = []
    for layer in sublayers_of(model):
        for name, value in sorted(vars(layer).items()):
            if name.startswith("_"):  # This is an attribute of Keras or tfdist.
                continue
            for variable in _variables_in([value]):
                if id(variable) not in known and _is_numeric(variable):
                    known.add(id(variable))
                    found.append(variable)
    return found


def _variables_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (keras.Variable, tf.Variable)):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _variables_in(value)
        elif isinstance(value, dict):
            yield from _variables_in(value.values())


def _is_numeric(variable: Any) -> bool:
    kind = tf.as_dtype(variable.dtype)
    return bool(kind.is_floating or kind.is_integer or kind.is_bool or kind.is_complex)


def require_variables(model: keras.Model, callback: str) -> None:
    """Creates the variables of the model's optimizer, and checks that all other variables exist.

    Args:
        model: the model in training.
        callback: the name of the callback that needs the variables, for the error message.

    Raises:
        UnsupportedError: the model has no variables yet, or another optimizer of the model has
            none.
    """
    if not model.built:
        raise UnsupportedError(
            f"{callback} needs a model with variables. Received: {model.name!r}, which creates "
            "them in its first step. Call `model.build(shape)` before `fit`."
        )
    optimizer, trained = model.optimizer, model.trainable_variables
    if optimizer is not None and trained and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(trained)
    for name, other in optimizers_of(model).items():
        if other is not optimizer and not other.built:
            raise UnsupportedError(
                f"{callback} needs optimizers that have their variables. Received: "
                f"{name.removeprefix('optimizer ')!r} of {model.name!r}, which creates them in its "
                "first step. Call its `build(variables)`, in the strategy's scope, before `fit`."
            )


@dataclass(frozen=True)
class HeldVariable:
    """A variable of the state of training, or a shard of such a variable.

    Attributes:
        key: the name of the variable. If the value differs between workers, `worker_key` adds the
            worker to the name.
        variable: the TensorFlow variable; if there are several equal copies, the first copy.
        assign: a function that sets the variable on all devices, given an array of the same shape.
        start: for a shard, the index of its first element in the flattened variable; else None.
        is_worker_local: whether the value differs between workers.
        device: for a worker-local value, the index of the device that holds it.
        receives_sum: for a value that is summed over the workers, whether a restore with another
            number of workers sets this variable to the sum. If False, the variable is set to zero.
            None for all other values.
        known_sum: a variable that holds the sum over the workers, if all workers know the sum.
    """

    key: str
    variable: Any
    assign: Callable[[Any], object]
    start: int | None = None
    is_worker_local: bool = False
    device: int = 0
    receives_sum: bool | None = None
    known_sum: tf.Variable | None = None

    def read(self) -> tf.Tensor:
        """Returns the current value.

        The value is copied only if the variable changes while the value is still in use.
        """
        with tf.device(self.variable.device):
            return self.variable.read_value()

    @property
    def is_common(self) -> bool:
        """Whether the value is equal on all workers that hold the same part of the model."""
        return not self.is_worker_local and self.start is None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the variable, or of the shard."""
        return tuple(self.variable.shape)


OF_WORKER = " of worker "


def worker_key(held: HeldVariable, rank: int) -> str:
    """Returns the name of one worker's value, for a variable that differs between workers."""
    return f"{held.key}{OF_WORKER}{rank}, device {held.device}"


def held_variables(model: keras.Model, stored: Container[str] | None = None) -> list[HeldVariable]:
    """Returns the variables of the state of training that this worker holds.

    Args:
        model: a compiled model. The model and its optimizer must be built.
        stored: the names in a snapshot, if the variables will be restored from the snapshot.
    """
    return [*_model_state(model), *_metrics(model), *_global_seed(stored)]


def optimizer_classes(model: keras.Model) -> dict[str, list[str]]:
    """Returns the names of the classes of a model's optimizers, by the keys of `optimizers_of`."""
    return {
        name: [
            type(one).__name__ for one in (*wrappers(optimizer), *updating_optimizers(optimizer))
        ]
        for name, optimizer in optimizers_of(model).items()
    }


def parts_held_entirely(model: keras.Model) -> set[str]:
    """Returns the names of the parts of the state that each worker holds entirely.

    These parts are the model, its untracked variables, and each optimizer that is not sharded. In a
    pipeline, no worker holds any part entirely.
    """
    if is_pipeline_model(model):
        return set()
    optimizers = optimizers_of(model).items()
    return {"model", _UNTRACKED, *(name for name, one in optimizers if sharded_by(one) is None)}


def read_all(
    variables: Sequence[HeldVariable], rank: int, *, shared: bool
) -> list[tuple[str, int | None, tf.Tensor]]:
    """Returns the names, starts and values of variables, so that they can be written to a file.

    Args:
        variables: this worker's variables.
        rank: this worker's rank.
        shared: whether to include the variables that other workers also hold.
    """
    found: list[tuple[str, int | None, tf.Tensor]] = []
    for held in variables:
        if held.known_sum is not None:  # The sum is not lost if a worker's own value is lost.
            if shared:
                found.append((held.key, None, held.known_sum.read_value()))
        elif held.is_worker_local:
            found.append((worker_key(held, rank), None, held.read()))
        elif shared or held.start is not None:
            found.append((held.key, held.start, held.read()))
    return found


def stored_arrays(read: Iterable[tuple[str, int | None, tf.Tensor]]) -> list[StoredArray]:
    """Converts values to arrays, and waits until the values are copied from their devices."""
    return [StoredArray(key, np.asarray(value.numpy()), start) for key, start, value in read]


def _model_state(model: keras.Model) -> Iterator[HeldVariable]:
    own = set()
    for optimizer in optimizers_of(model).values():
        if accumulates_own(optimizer, extended_of(model.distribute_strategy)):
            own |= {id(v) for o in updating_optimizers(optimizer) for v in accumulators(o)}
    if is_pipeline_model(model):
        weights, slots = model.held_variables()
    else:
        weights = {f"model/{i}": v for i, v in enumerate(model.variables)}
        untracked = untracked_variables(model)
        weights |= {f"{_UNTRACKED}/{i}": v for i, v in enumerate(untracked)}
        slots = {
            f"{name}/{i}": v
            for name, optimizer in optimizers_of(model).items()
            for i, v in enumerate(_full_variables(optimizer))
        }
    for key, variable in weights.items():
        yield _equal(key, variable)
    for key, variable in slots.items():
        if isinstance(variable, FullSlot):
            for start, slot, assign in variable.parts:
                yield HeldVariable(key, _copies(slot)[0], assign, start=start)
        elif id(variable) in own:
            yield from _one_per_device(key, variable, _is_first(model))
        else:
            yield _equal(key, variable)


def _full_variables(optimizer: Any) -> list[Any]:
    if sharded_by(optimizer) is None:
        return list(optimizer.variables)
    return FullState(optimizer).variables


def _metrics(model: keras.Model) -> Iterator[HeldVariable]:
    variables = {id(v): v for metric in model.metrics for v in metric.variables}
    # In a pipeline, only the metrics on the workers of the last stage are used.
    kind = (
        "metrics" if not is_pipeline_model(model) or model.holds_last_stage else "metrics elsewhere"
    )
    first = _is_first(model) and kind == "metrics"
    totals = totals_of(model)
    for number, variable in enumerate(variables.values()):
        summed = isinstance(getattr(variable, "value", None), SummedVariable)
        if is_pipeline_model(model) or summed:
            known_sum = totals.of(variable) if summed and totals is not None else None
            yield from _one_per_device(f"{kind}/{number}", variable, first, known_sum)
        else:
            yield _equal(f"{kind}/{number}", variable)


def _is_first(model: keras.Model) -> bool:
    """Whether this is the first of the workers that hold the same part of the model."""
    return bool(extended_of(model.distribute_strategy).worker_rank == 0)


def _global_seed(stored: Container[str] | None) -> Iterator[HeldVariable]:
    state = global_seed_state(create=stored is not None and _SEED in stored)
    if state is not None and (stored is None or _SEED in stored):
        yield _equal(_SEED, state)


_SEED = "global seed"
_UNTRACKED = "beside the model"


def _equal(key: str, variable: Any) -> HeldVariable:
    """Describes a variable that is equal on all devices, and on all workers that hold it."""
    return HeldVariable(key, _copies(variable)[0], variable.assign)


def _one_per_device(
    key: str, variable: Any, first: bool, known_sum: tf.Variable | None = None
) -> Iterator[HeldVariable]:
    for device, copy in enumerate(_copies(variable)):

        def assign(value: Any, copy: Any = copy) -> None:
            with tf.device(copy.device):
                copy.assign(value)
            if isinstance(variable.value, SummedVariable):
                variable.value.forget_total()

        here = first and device == 0
        yield HeldVariable(
            key,
            copy,
            assign,
            is_worker_local=True,
            device=device,
            receives_sum=here,
            known_sum=known_sum,
        )


def _copies(variable: Any) -> list[Any]:
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return list(getattr(value, "values", [value]))


def fitting(held: HeldVariable, values: Array) -> Array:
    """Reshapes values to the shape of a variable.

    Raises:
        ValueError: the values have another shape or type, so they belong to another model.
    """
    expected = np.dtype(held.variable.dtype.as_numpy_dtype)
    shape = values.shape if held.start is None else (values.size,)
    if held.shape != tuple(shape) or values.dtype != expected:
        raise ValueError(
            f"{held.key} is {values.dtype.name}{list(shape)} there, and "
            f"{expected.name}{list(held.shape)} in {held.variable.name!r} of this model"
        )
    return values.reshape(held.shape)


def states_of(callbacks: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Returns the states of callbacks.

    Args:
        callbacks: the callbacks, in the order of their calls.

    Returns:
        The states that JSON can represent, by the class and number of each callback; and the
        arrays in the states, by name.
    """
    states: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for name, callback in _named(callbacks):
        state: dict[str, Any] = {"attributes": attributes_of(callback)}
        if isinstance(callback, keras.callbacks.CSVLogger) and CsvFile(callback).is_written:
            state["csv"] = CsvFile(callback).read()
        if isinstance(callback, keras.callbacks.History):
            state["history"] = {"epoch": callback.epoch, "logs": callback.history}
        if (own := protocol_of(callback).state_dict()) is not None:
            state["own"] = _checked(callback, own)
        weights = best_weights_of(callback)
        if weights is not None:
            state["best_weights"] = len(weights)
            arrays |= {_weight(name, i): np.asarray(w) for i, w in enumerate(weights)}
        states[name] = _plain(state)
    return states, arrays


def load_states(callbacks: Sequence[Any], states: Mapping[str, Any], array_of: Any) -> None:
    """Restores the states of callbacks; callbacks without a saved state stay unchanged.

    Args:
        callbacks: the callbacks, in the order of their calls. Their `on_train_begin` must have been
            called.
        states: the states that `states_of` returned.
        array_of: a function that returns the array with a name.
    """
    for name, callback in _named(callbacks):
        state = states.get(name)
        if state is None:
            continue
        for attribute, value in state["attributes"].items():
            setattr(callback, attribute, value)
        if "csv" in state and CsvFile(callback).is_written:
            CsvFile(callback).restore(state["csv"])
        if "history" in state:
            callback.epoch[:] = state["history"]["epoch"]
            callback.history.clear()
            callback.history.update(state["history"]["logs"])
        if "own" in state:
            protocol_of(callback).load_state_dict(state["own"])
        if "best_weights" in state:
            count = state["best_weights"]
            set_best_weights(callback, [array_of(_weight(name, i)) for i in range(count)])


def _named(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    seen: Counter[str] = Counter()
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] += 1
        yield f"{kind} {seen[kind]}", callback


def _weight(name: str, number: int) -> str:
    return f"callback {name}/best weights/{number}"


def _checked(callback: Any, state: Any) -> Any:
    try:
        json.dumps(_plain(state))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`state_dict()` of a callback must return what JSON can represent. Received: {error}, "
            f"from {type(callback).__name__}. Return numbers, strings, lists and dicts."
        ) from error
    return state


def _plain(value: Any) -> Any:
    """Converts the arrays and tensors in a value to lists and numbers, which JSON can represent."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return np.asarray(value).tolist()


def codec_arrays(model: Any, rank: int) -> dict[str, Array]:
    """Returns the state of this worker's codecs, as arrays by name."""
    return {
        f"{_prefix(number, rank)}{name}": value
        for number, optimizer in enumerate(_optimizers(model))
        if (state := getattr(optimizer, "compression_state", None)) is not None
        for name, value in state.values().items()
    }


def load_codec_arrays(model: Any, rank: int, arrays: dict[str, Array]) -> None:
    """Restores the state of this worker's codecs, and creates this state if it does not exist yet.

    Args:
        model: the model in training.
        rank: this worker's rank.
        arrays: the arrays by name, as returned by `codec_arrays`.
    """
    compressor = compressor_of(model)
    for number, optimizer in enumerate(_optimizers(model)):
        prefix = _prefix(number, rank)
        own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        if not own or compressor is None:
            continue
        if not hasattr(optimizer, "compression_state"):
            optimizer.compression_state = compressor.new_state()
        optimizer.compression_state.load(own)


def _optimizers(model: Any) -> list[Any]:
    if compressor_of(model) is None or model.optimizer is None:
        return []
    return updating_optimizers(model.optimizer)


def _prefix(number: int, rank: int) -> str:
    return f"compression/worker {rank}/optimizer {number}/"
