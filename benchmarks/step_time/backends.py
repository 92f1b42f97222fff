"""The backends to compare, and the backends that each is compared with."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

from benchmarks.all_reduce.python import require


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to train; the functions are in `keras_training` and `torch_training`.

    Attributes:
        framework: the framework: `"keras"` (on TensorFlow), `"jax"` (Keras on JAX) or `"torch"`.
        compiled: whether XLA compiles the step.
        connected: whether its workers communicate.
        alone: whether it runs with one worker.
        several: whether it runs with several workers.
        of_losses: whether its loss or metric differs from the usual one.
    """

    framework: str
    compiled: bool = False
    connected: bool = False
    alone: bool = True
    several: bool = True
    of_losses: bool = False


BACKENDS = {
    "tfdist": Backend("keras", connected=True),
    "tfdist_loop": Backend("keras", connected=True, alone=False),
    "tfdist_replica_statistics": Backend("keras", connected=True, alone=False),
    "tfdist_mse": Backend("keras", connected=True, alone=False, of_losses=True),
    "tfdist_rmse": Backend("keras", connected=True, alone=False, of_losses=True),
    "tfdist_dice": Backend("keras", connected=True, alone=False, of_losses=True),
    "tfdist_f1": Backend("keras", connected=True, alone=False, of_losses=True),
    "tfdist_xla": Backend("keras", compiled=True, connected=True),
    "tfdist_tensorflow": Backend("keras", connected=True, alone=False),
    "tfdist_sharded": Backend("keras", connected=True, alone=False),
    "keras": Backend("keras", several=False),
    "keras_xla": Backend("keras", compiled=True, several=False),
    "stock": Backend("keras", connected=True, alone=False),
    "unconnected": Backend("keras", alone=False),
    "unconnected_xla": Backend("keras", compiled=True, alone=False),
    "ddp": Backend("torch", connected=True),
    "ddp_unconnected": Backend("torch"),
    "jax": Backend("jax", compiled=True, connected=True),
    "jax_unconnected": Backend("jax", compiled=True),
}
INSTALL_TORCH = "pip install torch==2.13.0, or name a Python that has it by --torch_python"
# The frameworks that may need a separate Python. Each name is also the name of the package.
INSTALL = {
    "torch": INSTALL_TORCH,
    "jax": "pip install jax keras, or name a Python that has them by --jax_python",
}


def possible(backends: list[str], workers: int) -> list[str]:
    """Returns the backends that run with this number of workers."""
    return [b for b in backends if (BACKENDS[b].alone if workers == 1 else BACKENDS[b].several)]


def limit(backend: str, workers: int) -> str:
    """Returns the backend without communication for the same model, framework and workers."""
    found = BACKENDS[backend]
    if found.framework in INSTALL:
        return {"torch": "ddp_unconnected", "jax": "jax_unconnected"}[found.framework]
    return ("keras" if workers == 1 else "unconnected") + ("_xla" if found.compiled else "")


def peer(backend: str, workers: int) -> str:
    """Returns the backend that trains the same Keras model in another way; "" for torch."""
    if BACKENDS[backend].framework == "torch":
        return ""
    if backend in ("tfdist_sharded", "tfdist_xla"):
        return "tfdist"
    if backend in ("tfdist_rmse", "tfdist_dice", "tfdist_f1"):
        return "tfdist_mse"
    if backend == "tfdist_replica_statistics":
        return "tfdist_loop"
    if BACKENDS[backend].framework == "jax":
        return "tfdist_xla" if BACKENDS[backend].connected else "unconnected_xla"
    return "keras" if workers == 1 else "stock"


def find_python(backend: str, pythons: Mapping[str, str]) -> str:
    """Returns the Python that runs a backend.

    Args:
        backend: a key of `BACKENDS`.
        pythons: a Python for each framework; this Python by default.

    Raises:
        MissingError: the Python lacks the framework; the message contains the remedy.
    """
    framework = BACKENDS[backend].framework
    python = pythons.get(framework, sys.executable)
    if framework in INSTALL:
        require(python, framework, INSTALL[framework])
    return python
