"""Ensures that all ranks have the same layers, `compile` arguments and trainable variables."""

import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist._src.group import Group
from tfdist._src.pipeline.partition.cut import Partition, Stage, unique
from tfdist._src.pipeline.partition.graph import Graph
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.strategy.extended import extended_of
from tfdist.errors import ProgramMismatchError


def agree_on_model(graph: Graph, group: Group) -> None:
    """Checks that all ranks made the same model; all ranks must call it together.

    Without this check, a different layer on one rank would go unnoticed, since each rank runs only
    its own stages.

    Args:
        graph: the model's calls.
        group: all workers.

    Raises:
        ProgramMismatchError: two ranks have different layers, or the same layers in different
            positions. The message names the first difference.
    """
    calls = [
        (
            f"the layer {call.name!r},",
            _described(call.operation)
            + _normal(f"{call.args} {dict(call.kwargs)} {call.outputs} {call.training}"),
        )
        for call in graph.calls
    ]
    _compare("models", calls, group)


def agree_on_compilation(compiled: Mapping[str, Any], group: Group) -> None:
    """Checks that all ranks compile a model identically; all ranks must call it together.

    Args:
        compiled: the arguments of `compile`, by name.
        group: all workers.

    Raises:
        ProgramMismatchError: two ranks pass different values for an argument. The message names the
            first such argument.
    """
    arguments = [(f"`{k}`,", f"{k}={_described(v)}") for k, v in sorted(compiled.items())]
    _compare("arguments of `compile`", arguments, group)


def _compare(topic: str, mine: Sequence[tuple[str, str]], group: Group) -> None:
    """Compares lists of items on all ranks, and raises an error at the first difference.

    Args:
        topic: the subject of the comparison, for the error message.
        mine: this rank's items, as pairs `(name, description)`. Only the descriptions are
            compared. The names are used in the error message.
        group: all workers.

    Raises:
        ProgramMismatchError: an item has different descriptions on two ranks.
    """
    everyone = [json.loads(text) for text in group.exchange(topic, json.dumps(mine))]
    for rank, items in enumerate(everyone):
        pairs = itertools.zip_longest(everyone[0], items, fillvalue=("nothing", ""))
        for (name, value), (other, found) in pairs:
            if value != found:
                chief, worker = group.topology.workers[0], group.topology.workers[rank]
                raise ProgramMismatchError(
                    f"The workers have different {topic}: {chief} has {_shown(name, value, found)} "
                    f"where {worker} has {_shown(other, found, value)}. Run the same code with the "
                    "same arguments on all workers."
                )


# If two descriptions differ, an error message shows this many characters of each description
# before and after the first difference.
_BEFORE, _AFTER = 40, 80


def _shown(name: str, value: str, other: str) -> str:
    pairs = itertools.zip_longest(value, other)
    common = next(i for i, (one, another) in enumerate(pairs) if one != another)
    first, last = max(0, common - _BEFORE), common + _AFTER
    cut = f"{'...' if first else ''}{value[first:last]}{'...' if value[last:] else ''}"
    return f"{name} {cut}".strip()


def _described(item: Any) -> str:
    """Returns a text that is equal for two layers, losses or optimizers with equal configs."""
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(map(_described, item))}]"
    if isinstance(item, Mapping):
        return f"{{{', '.join(f'{k}: {_described(v)}' for k, v in item.items())}}}"
    if hasattr(item, "get_config") and not isinstance(item, type):
        config: Any = ""
        with contextlib.suppress(Exception):  # Some custom classes have no config.
            config = _plain(item.get_config())
        return _normal(f"{type(item).__name__}({config})")
    name = getattr(item, "__qualname__", None)
    return _normal(repr(item)) if name is None else str(name)


# Parts of a config that may differ between ranks. Names may contain counters. A layer's seed and
# `trainable` flag count only on the ranks that hold the layer. The serialized code of a function
# contains file names, which may differ between hosts.
_LEFT_OUT = frozenset(
    {"name", "seed", "trainable", "registered_name", "module", "function", "build_config"}
)


def _plain(config: Any) -> Any:
    """Returns a Keras config without the parts that may differ between ranks."""
    if isinstance(config, Mapping):
        kind = config.get("class_name")
        if kind == "__lambda__":
            return kind
        if str(kind).endswith("DTypePolicy"):
            return str(config["config"])
        return {str(k): _plain(v) for k, v in config.items() if k not in _LEFT_OUT}
    if isinstance(config, (list, tuple)):
        return [_plain(v) for v in config]
    return config


def _normal(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def agree_on_trainable(partition: Partition, strategy: HybridStrategy) -> None:
    """Copies the `trainable` flags of all layers and variables from the ranks that hold them.

    On each rank, `model.layers` contains only the layers of the rank's own stages. So if a script
    freezes or unfreezes a layer, it does so only on the ranks that hold the layer. The other ranks
    also need the flag, for example to know which gradients they receive. All ranks of the job must
    call this function together.

    Args:
        partition: the model's partition into stages.
        strategy: the strategy, which assigns the stages to ranks.

    Raises:
        ValueError: ranks that hold the same layer or variable have different flags for it.
    """
    group = extended_of(strategy).group
    local = [partition.stages[index] for index in strategy.stages_of(strategy.pipeline_rank)]
    items = _layers_and_variables(partition.stages)
    local_ids = {id(item) for item in _layers_and_variables(local)}
    local_flags = [int(item.trainable) if id(item) in local_ids else None for item in items]
    all_flags = [json.loads(text) for text in group.exchange("trainable", json.dumps(local_flags))]
    # In `items`, the layers precede the variables, since a layer's flag sets its variables' flags.
    for item, flags in zip(items, zip(*all_flags, strict=True), strict=True):
        known = {rank: flag for rank, flag in enumerate(flags) if flag is not None}
        if len(set(known.values())) > 1:
            workers = group.topology.workers
            yes, no = (min(r for r, flag in known.items() if flag == f) for f in (1, 0))
            raise ValueError(
                "`trainable` must be equal on all workers that hold a layer or variable. Received: "
                f"{getattr(item, 'path', item.name)!r}, trainable on {workers[yes]} and not on "
                f"{workers[no]}. Set `trainable` identically on all workers."
            )
        # A new worker is in a group of its own until it joins the other workers. Until then, it
        # keeps its own flags for the layers of other stages.
        wanted = bool(next(iter(known.values()), item.trainable))
        if item.trainable != wanted:
            item.trainable = wanted


def _layers_and_variables(stages: Sequence[Stage]) -> list[Any]:
    layers = unique(layer for stage in stages for layer in stage.layers)
    return [*layers, *unique(v for stage in stages for v in stage.variables)]
