"""Replaces functions of Keras and TensorFlow, each layer once.

What is replaced, and with which parameters, is in `tfdist.internals.contract`. Several modules may
go around the same function; `LAYERS` says in which order. A replacement is marked by its layer, so
that one that is there already is not put around itself: not by another thread, and not where a
module is reloaded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.internals.contract import TARGETS, Target

# The modules of `tfdist.trainer` that replace anything, from the innermost to the outermost.
LAYERS = (
    "losses.reductions",
    "losses.coupled_losses",
    "losses.metrics",
    "losses.row_mixing",
    "fit.nested_functions",
    "fit.clear_session",
    "losses.random_streams",
    "losses.batch_noise",
    "older_keras",
    "optimizers.sharded_optimizers",
    "optimizers.sharded_averages",
    "optimizers.replicated",
    "optimizers.overriding",
    "fit.loops",
    "fit.call_checks",
    "fit.epochs",
    "fit.own_callbacks",
    "saving.files",
    "saving.sharded_files",
    "saving.compression_files",
    "saving.callbacks",
)
_MARK = "__tfdist_layer__"


def patch(name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces a function by one that goes around it.

    Args:
        name: of a target in the contract.
        wrap: takes the function that is there and returns the other one. Its module is the layer.

    Raises:
        RuntimeError: a layer that belongs around this one is there already.
    """
    put_around(TARGETS[name], wrap)


def put_around(target: Target, wrap: Callable[[Any], Any]) -> None:
    """Does what `patch` does, to any target."""
    layer = wrap.__module__.removeprefix("tfdist.trainer.")
    current = _without_stale(target.function)
    there = layers_around(current)
    if layer in there:
        return
    if any(LAYERS.index(other) > LAYERS.index(layer) for other in there):
        raise RuntimeError(f"The hooks of {layer!r} go inside of those of {there}: {target}.")
    around = functools.update_wrapper(wrap(current), current)
    setattr(around, _MARK, layer)
    setattr(target.owner, target.name, around)


def layers_around(function: Any) -> list[str]:
    """The layers around a function, the innermost first."""
    marks = [vars(part)[_MARK] for part in _chain(function) if _MARK in vars(part)]
    return list(dict.fromkeys(reversed(marks)))


def _chain(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = vars(function).get("__wrapped__")


def _without_stale(function: Any) -> Any:
    """The function, or what it replaces where its modules have been imported anew since then."""
    parts = list(_chain(function))
    marked = [i for i, part in enumerate(parts) if _MARK in vars(part)]
    if all(_is_live(parts[i]) for i in marked):
        return function
    return parts[marked[-1] + 1]


def _is_live(function: Any) -> bool:
    namespace = getattr(function, "__globals__", None)
    if namespace is None:
        return True  # Made by another package around one of these.
    module = sys.modules.get(namespace["__name__"])
    return module is not None and vars(module) is namespace
