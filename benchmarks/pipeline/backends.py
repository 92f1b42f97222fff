"""The backends that the benchmark compares, and the lines of its table."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to train. The class that trains is `Trainer` in the module `<framework>_trainer`.

    Attributes:
        framework: the framework of the model, `"keras"` or `"torch"`.
        in_stages: whether the backend is a pipeline. If it is not, one process trains the whole
            model.
        alone: the backend that trains the same model in one process, with the same framework.
        peer: for Keras pipelines, the backend that is a pipeline in torch. For other backends, "".
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
WHOLE = "whole"  # The value of `Entry.schedule` for backends that are not pipelines.


@dataclasses.dataclass(frozen=True)
class Entry:
    """The description of one line of the table.

    Attributes:
        backend: a key of `BACKENDS`.
        schedule: the name of the schedule, or `WHOLE` if the backend is not a pipeline.
        microbatches: the number of microbatches; 1 if the backend is not a pipeline.
    """

    backend: str
    schedule: str
    microbatches: int


def entries(backends: list[str], schedules: list[str], microbatches: list[int]) -> list[Entry]:
    """Returns the entries to measure.

    A backend that is a pipeline has an entry for each schedule and each number of microbatches.
    Other backends have one entry.
    """
    found = []
    for backend in backends:
        if BACKENDS[backend].in_stages:
            found += [Entry(backend, s, m) for m in microbatches for s in schedules]
        else:
            found.append(Entry(backend, WHOLE, 1))
    return found
