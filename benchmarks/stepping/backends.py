"""The ways to train that are compared, and what each is measured against."""

from __future__ import annotations

import dataclasses

from reducing.python import require


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to train; the functions are in `keras_training` and `torch_training`.

    Attributes:
        framework: what the model is written in, `"keras"` or `"torch"`.
        connected: whether its workers talk to each other.
        alone: whether it runs with one worker.
        several: whether it runs with more.
    """

    framework: str
    connected: bool = False
    alone: bool = True
    several: bool = True


BACKENDS = {
    "tfdist": Backend("keras", connected=True),
    "tfdist_tensorflow": Backend("keras", connected=True, alone=False),
    "tfdist_sharded": Backend("keras", connected=True, alone=False),
    "keras": Backend("keras", several=False),
    "stock": Backend("keras", connected=True, alone=False),
    "unconnected": Backend("keras", alone=False),
    "ddp": Backend("torch", connected=True),
    "ddp_unconnected": Backend("torch"),
}
INSTALL_TORCH = "pip install torch==2.13.0, or name a Python that has it by --torch_python"


def possible(backends: list[str], workers: int) -> list[str]:
    """Those that run with so many workers."""
    return [b for b in backends if (BACKENDS[b].alone if workers == 1 else BACKENDS[b].several)]


def limit(backend: str, workers: int) -> str:
    """The same model in the same framework, as many times, each alone."""
    if BACKENDS[backend].framework == "torch":
        return "ddp_unconnected"
    return "keras" if workers == 1 else "unconnected"


def peer(backend: str, workers: int) -> str:
    """The other way to train the same Keras model; "" where the model is not Keras's."""
    if BACKENDS[backend].framework == "torch":
        return ""
    if backend == "tfdist_sharded":
        return "tfdist"
    return "keras" if workers == 1 else "stock"


def find_python(backend: str, keras_python: str, torch_python: str) -> str:
    """The Python that runs a backend.

    Raises:
        MissingError: it has no torch, and the backend takes it; with what installs it.
    """
    if BACKENDS[backend].framework != "torch":
        return keras_python
    require(torch_python, "torch", INSTALL_TORCH)
    return torch_python
