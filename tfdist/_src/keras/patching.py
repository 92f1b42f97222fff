"""Wraps functions of Keras and TensorFlow, and installs all hooks of this package.

`internals/contract.py` lists the functions to wrap (the targets) and their parameters. Several
modules may wrap the same function. Each of these modules is a layer, and `LAYERS` defines their
order. Each wrapper is marked with its layer, so that no layer is applied twice, even by another
thread or when a module is reloaded.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tfdist._src.internals.contract import TARGETS, Target, check_targets

# The modules of this package that patch anything, from the innermost to the outermost.
LAYERS = (
    "older_keras",
    "batch_statistics",
    "optimizers.repeated_slices",
    "optimizers.sharded_optimizers",
    "optimizers.summing",
    "fit.compilation",
    "fit.call_checks",
    "fit.epoch_iterator",
    "fit.hooks",
    "saving.files",
    "saving.compression_files",
    "saving.callbacks",
)
_MARK = "__tfdist_layer__"


def patch(name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces a function with a wrapper around it.

    Args:
        name: the name of the function in `TARGETS`.
        wrap: maps the current function to its replacement. The module that defines `wrap` is the
            layer.

    Raises:
        RuntimeError: a layer that must be outside of this one is already installed.
    """
    patch_target(TARGETS[name], wrap)


def patch_target(target: Target, wrap: Callable[[Any], Any]) -> None:
    """Replaces any function with a wrapper around it, like `patch`."""
    layer = wrap.__module__.removeprefix("tfdist._src.keras.")
    current = _without_stale(target.function)
    installed = layers_of(current)
    if layer in installed:
        return
    if any(LAYERS.index(other) > LAYERS.index(layer) for other in installed):
        raise RuntimeError(f"The hooks of {layer!r} must go inside those of {installed}: {target}.")
    wrapper = functools.update_wrapper(wrap(current), current)
    setattr(wrapper, _MARK, layer)
    setattr(target.owner, target.name, wrapper)


def layers_of(function: Any) -> list[str]:
    """Returns the layers that wrap a function, the innermost layer first."""
    marks = [vars(part)[_MARK] for part in _chain(function) if _MARK in vars(part)]
    return list(dict.fromkeys(reversed(marks)))


def _chain(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = vars(function).get("__wrapped__")


def _without_stale(function: Any) -> Any:
    """Returns the function without the wrappers of modules that have been reloaded since."""
    parts = list(_chain(function))
    marked = [i for i, part in enumerate(parts) if _MARK in vars(part)]
    if all(_is_live(parts[i]) for i in marked):
        return function
    return parts[marked[-1] + 1]


def _is_live(function: Any) -> bool:
    namespace = getattr(function, "__globals__", None)
    if namespace is None:
        return True  # Another package has wrapped one of tfdist's wrappers.
    module = sys.modules.get(namespace["__name__"])
    return module is not None and vars(module) is namespace


_lock = threading.Lock()
_installed = False


def install() -> None:
    """Makes Keras train correctly under tfdist strategies, and leaves it otherwise unchanged.

    Raises:
        UnsupportedError: this version of Keras or TensorFlow is not supported. No function has been
            replaced.
    """
    global _installed
    with _lock:
        if _installed:
            return
        check_targets(TARGETS)
        for layer in LAYERS:
            importlib.import_module(f"tfdist._src.keras.{layer}").install()
        _installed = True
