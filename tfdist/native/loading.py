"""Loads the libraries, at most once in a process."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.errors import NativeUnavailableError
from tfdist.native import api, builder
from tfdist.native.build import Build
from tfdist.native.recipe import SOURCE
from tfdist.options import NativeOptions


@dataclass(frozen=True)
class Core:
    """The loaded core.

    Attributes:
        library: its C functions, with their types.
        build: what they are from.
    """

    library: ctypes.CDLL
    build: Build


# Loading a library twice makes it no other, and TensorFlow refuses ops that it knows already.
_lock = threading.RLock()
_core: Core | None = None
_ops: Any = None


def load() -> Core:
    """Loads the core, which is compiled first if this machine has not done so yet.

    Returns:
        The core, in this process always the same.

    Raises:
        NativeUnavailableError: it is switched off, or cannot be compiled or loaded.
        ValueError: a setting is wrong.

    Example:
        >>> load().library.tfd_segment_bytes(2)  # doctest: +SKIP
        6340608
    """
    global _core
    with _lock:
        if _core is None:
            _core = load_core(_options())
        return _core


def load_ops() -> Any:
    """Loads TensorFlow's ops, and the core before them; imports TensorFlow.

    Returns:
        The module that `tf.load_op_library` makes, in this process always the same.

    Raises:
        NativeUnavailableError: they are switched off, or cannot be compiled or loaded.
        ValueError: a setting is wrong.
    """
    global _ops
    with _lock:
        if _ops is None:
            _ops = load_op_library(load().build)
        return _ops


def load_core(options: NativeOptions, source: Path = SOURCE) -> Core:
    """Loads a core that is found or made.

    A library that does not load (made for a newer system, or damaged) is passed over: the next
    one is tried, and at last a new one is compiled.
    """
    began = time.time()
    rejected: list[str] = []
    while True:
        build = builder.ensure(options, source, rejected=rejected)
        try:
            library = api.declare(ctypes.CDLL(str(build.core)))
        except AttributeError as error:
            raise NativeUnavailableError(
                f"{build.core} lacks a function ({error}): install tfdist again."
            ) from error
        except OSError as error:
            # One that was made just now will be no better next time.
            if build.finished >= began or build.stamp in rejected:
                raise NativeUnavailableError(
                    f"The native collectives cannot be loaded: {error}. If {build.folder} is on a "
                    f"file system without permission to execute, set TFDIST_CACHE to another "
                    f"folder."
                ) from error
            rejected.append(build.stamp)
        else:
            if library.tfd_use_vector_unit(options.vector_unit.encode()):
                message = library.tfd_error().decode(errors="replace")
                raise ValueError(f"TFDIST_VECTOR_UNIT: {message}")
            return Core(library, build)


def load_op_library(build: Build) -> Any:
    """Loads the ops of a build whose core is loaded."""
    if build.ops is None:
        raise NativeUnavailableError(
            f"{build.folder} has no ops for TensorFlow: install tfdist again."
        )
    import tensorflow as tf

    try:
        return tf.load_op_library(str(build.ops))
    except (tf.errors.OpError, OSError) as error:
        raise NativeUnavailableError(
            f"TensorFlow {tf.__version__} cannot load {build.ops}, which was made for "
            f"{build.tensorflow} ({error}): run tfdist build --force."
        ) from error


def _options() -> NativeOptions:
    options = NativeOptions.from_environment()
    if not options.enabled:
        raise NativeUnavailableError(
            "The native collectives are switched off by TFDIST_NATIVE=0: unset it to use them."
        )
    return options
