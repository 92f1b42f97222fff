"""The backends that the benchmark compares, and the limit and the peer of each backend.

The limit of a backend is the same training without communication. The peer of a backend is another
way to train the same model.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

from benchmarks.all_reduce.python import require


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to train. The function that trains is in the module `<framework>_training`.

    Attributes:
        framework: `"keras"` (Keras on TensorFlow), `"jax"` (Keras on JAX) or `"torch"`.
        compiled: whether XLA compiles the training step.
        connected: whether the workers communicate.
        alone: whether the backend supports a single worker.
        several: whether the backend supports several workers.
        of_losses: whether the backend has a special loss or metric. Such a backend is not measured
            by default.
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
# The frameworks that may be installed in the environment of another Python, and how to install
# them. The name of the framework is also the name of its module.
INSTALL = {
    "torch": INSTALL_TORCH,
    "jax": "pip install jax keras, or name a Python that has them by --jax_python",
}


def possible(backends: list[str], workers: int) -> list[str]:
    """Selects the backends that support this number of workers."""
    return [b for b in backends if (BACKENDS[b].alone if workers == 1 else BACKENDS[b].several)]


def limit(backend: str, workers: int) -> str:
    """Returns the limit of a backend: the backend that does the same without communication."""
    found = BACKENDS[backend]
    if found.framework in INSTALL:
        return {"torch": "ddp_unconnected", "jax": "jax_unconnected"}[found.framework]
    return ("keras" if workers == 1 else "unconnected") + ("_xla" if found.compiled else "")


def peer(backend: str, workers: int) -> str:
    """Returns the peer of a backend: another way to train the same Keras model; "" for torch."""
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
    """Returns the Python interpreter that runs the workers of a backend.

    Args:
        backend: a key of `BACKENDS`.
        pythons: the interpreters by framework. Frameworks without an entry use this interpreter.

    Raises:
        MissingError: the interpreter cannot import the framework. The message explains how to
            install the framework.
    """
    framework = BACKENDS[backend].framework
    python = pythons.get(framework, sys.executable)
    if framework in INSTALL:
        require(python, framework, INSTALL[framework])
    return python
