"""The backends to compare, and the backends that each is compared with."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to train; its trainer is in the module `<framework>_trainer`.

    Attributes:
        framework: the framework of the model, `"keras"` or `"torch"`.
        in_stages: whether it is a pipeline; otherwise, one process has the whole model.
        alone: the backend with one process of the same framework.
        peer: the backend with a pipeline of the other framework, or "".
        compiled: whether XLA compiles the model.
    """

    framework: str
    in_stages: bool
    alone: str
    peer: str = ""
    compiled: bool = False


BACKENDS = {
    "tfdist": Backend("keras", in_stages=True, alone="single", peer="torch"),
    "torch": Backend("torch", in_stages=True, alone="torch_single"),
    "single": Backend("keras", in_stages=False, alone="single"),
    "tfdist_xla": Backend("keras", in_stages=True, alone="single_xla", peer="torch", compiled=True),
    "single_xla": Backend("keras", in_stages=False, alone="single_xla", compiled=True),
    "torch_single": Backend("torch", in_stages=False, alone="torch_single"),
}
TORCH_SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "looped_bfs",
    "interleaved_zb",
    "zbv",
    "dualpipev",
)
WHOLE = "whole"  # The schedule of backends that are no pipeline.


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the table.

    Attributes:
        backend: a key of `BACKENDS`.
        schedule: the name of the schedule, or `WHOLE`.
        microbatches: the number of microbatches; 1 if the batch is not divided.
    """

    backend: str
    schedule: str
    microbatches: int


def entries(backends: list[str], schedules: list[str], microbatches: list[int]) -> list[Entry]:
    """Returns the entries to measure."""
    found = []
    for backend in backends:
        if BACKENDS[backend].in_stages:
            found += [Entry(backend, s, m) for m in microbatches for s in schedules]
        else:
            found.append(Entry(backend, WHOLE, 1))
    return found
