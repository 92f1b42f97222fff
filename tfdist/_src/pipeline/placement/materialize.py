"""Partitions a model in the same way on all workers, and allocates each worker's variables."""

import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from tfdist._src.group import Group
from tfdist._src.internals.optimizer import is_overwritten
from tfdist._src.internals.variables import (
    deferred_variables,
    draw_value,
    free_value,
    has_value,
    materialize_value,
)
from tfdist._src.pipeline.partition.choose import COSTS, check_stages, decide, partition
from tfdist._src.pipeline.partition.cut import Partition, cut_model
from tfdist._src.pipeline.partition.linearize import linearize
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.strategy.extended import extended_of
from tfdist.errors import TfdistError, UnsupportedError


def build(
    model: keras.Model | Callable[[], keras.Model],
) -> tuple[keras.Model, list[weakref.ref[Any]]]:
    """Builds the full model, if possible without allocating its variables.

    If `model` is a function, the variables that it creates are deferred: they get no values until
    `materialize` is called. If `model` is a Keras model, its variables already have values.

    Returns:
        The model, and weak references to the deferred variables.

    Raises:
        ValueError: `model` is neither a Keras model nor a function that returns one.
        UnsupportedError: the model overrides `train_step` or a similar method, or has float8
            layers.
    """
    deferred: list[weakref.ref[Any]] = []
    if not isinstance(model, keras.Model):
        if not callable(model):
            raise ValueError(
                "`model` must be a Keras model or a function that returns one. "
                f"Received: {model!r}."
            )
        with deferred_variables() as variables:
            model = model()
        deferred = [weakref.ref(variable) for variable in variables]
        del variables
    if not isinstance(model, keras.Model):
        raise ValueError(f"The function must return a Keras model. Received: {model!r}.")
    for method in ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise UnsupportedError(
                "A PipelineModel has its own steps, which the model must not override. Received: "
                f"{type(model).__name__}, which overrides `{method}`. Use `compile` (losses and "
                "metrics), or layers with `add_loss`, instead."
            )
    recording = next((v.path for v in model.trainable_variables if is_overwritten(v)), None)
    if recording is not None:
        raise UnsupportedError(
            "A float8 layer records the largest values of a whole step, but a pipeline runs it on "
            f"one microbatch at a time. Received: {recording!r}. Train the model without a "
            "pipeline, or with another dtype policy."
        )
    return model, deferred


def check_free(model: keras.Model, deferred: Iterable[weakref.ref[Any]], group: Group) -> None:
    """Checks that all variables of a model still have values, unless they are deferred.

    A PipelineModel frees the values of all variables that its worker does not need. So the layers
    of a PipelineModel cannot be used in another model. All workers must call this function
    together.

    Args:
        model: the full model.
        deferred: the references that `build` returned.
        group: all workers.

    Raises:
        UnsupportedError: on some worker, a variable that is not deferred has no value.
    """
    pending = {id(reference()) for reference in deferred}
    freed = [v.path for v in model.variables if not has_value(v) and id(v) not in pending]
    found = [path for path in group.exchange("model", freed[0] if freed else "") if path]
    if found:
        raise UnsupportedError(
            "The layers of a PipelineModel cannot be used in another model, as no worker holds all "
            f"of them. Received: {model.name!r}, in which {found[0]!r} no longer has a value. "
            "Create new layers, or load them from a file."
        )


def materialize(
    variables: Sequence[Any], local: Iterable[Any], deferred: Iterable[weakref.ref[Any]]
) -> None:
    """Initializes the variables of this process's stages, and frees the model's other variables.

    Args:
        variables: the variables of the full model.
        local: the variables of this process's stages.
        deferred: the references that `build` returned, in the order in which the variables were
            created. The variables are initialized in this order, as in a single process, since
            their initializers may share a random generator. Some of them may not belong to
            `variables`, such as the state of a layer's metric.
    """
    local_ids, model_ids = {id(v) for v in local}, {id(v) for v in variables}
    for reference in deferred:
        variable = reference()
        if variable is None:
            continue
        if id(variable) in local_ids or id(variable) not in model_ids:
            materialize_value(variable)
        else:
            draw_value(variable)
    for variable in variables:
        if id(variable) in local_ids:
            materialize_value(variable)
        else:
            free_value(variable)


# The number of rows in the microbatch for which the calls are timed: large enough for realistic
# times, but small enough that the measurement is fast.
_ROWS = 8


def choose(
    model: keras.Model, strategy: HybridStrategy, cuts: Sequence[str] | None, balance: str
) -> Partition:
    """Cuts a model into as many stages as a strategy has; all workers must call it together.

    Args:
        model: the full model.
        strategy: the strategy. Its schedule determines the number of stages.
        cuts: the names of the calls after which to cut the model. If None, the stages are chosen
            by `balance`.
        balance: `"time"` or `"parameters"`.

    Raises:
        PartitionError: the model cannot be cut at `cuts`, or cannot be cut into this number of
            stages.
        UnsupportedError: the model could not be timed on the chief, or it has a fixed batch size.
    """
    _check_rows(model, strategy)
    stages = strategy.stages
    if cuts is not None or stages == 1 or balance not in COSTS:
        return partition(model, stages, balance=balance, cuts=cuts)
    graph = linearize(model)
    check_stages(graph, stages)
    group = extended_of(strategy).group
    local: dict[str, object] = {}
    if group.topology.is_chief:
        try:
            local["seconds"] = [cost.seconds for cost in COSTS[balance](graph, _ROWS)]
        except (TfdistError, ValueError) as error:
            local["error"] = str(error)
    result = json.loads(group.exchange("stages", json.dumps(local))[0])
    if "error" in result:
        raise UnsupportedError(f"The chief could not time the model: {result['error']}")
    seconds = result["seconds"]
    return cut_model(graph, decide(graph, stages, seconds, rows=_ROWS), seconds)


def _check_rows(model: keras.Model, strategy: HybridStrategy) -> None:
    """Checks that a model accepts any number of rows if batches are divided.

    Batches are not divided if there is one pipeline that runs one microbatch per step.

    Raises:
        UnsupportedError: the model has a fixed batch size.
    """
    if strategy.microbatches * strategy.num_replicas_in_sync == 1 or not model.built:
        return
    for tensor in model.inputs or []:
        if tensor.shape[:1] not in ((), (None,)):
            raise UnsupportedError(
                "A PipelineModel divides a batch, so its inputs must not fix the batch size. "
                f"Received: {tensor.name!r} of shape {tuple(tensor.shape)}. Pass `shape` without "
                "the rows instead of `batch_shape` or `batch_size`; layers with `stateful=True` "
                "need a full batch."
            )
