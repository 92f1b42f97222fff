"""The ways to train that are compared, and what each is measured against."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to train; its trainer is in the module `<framework>_trainer`.

    Attributes:
        framework: what the model is written in, `"keras"` or `"torch"`.
        in_stages: whether it is a pipeline; otherwise one process has the whole model.
        alone: the same framework's one process.
        peer: the other framework's pipeline, or "".
        compiled: whether XLA compiles it.
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
WHOLE = "whole"  # What stands for a schedule where there is none.


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the table.

    Attributes:
        backend: a key of `BACKENDS`.
        schedule: its name, or `WHOLE`.
        microbatches: their number; 1 where the batch is not cut.
    """

    backend: str
    schedule: str
    microbatches: int


def entries(backends: list[str], schedules: list[str], microbatches: list[int]) -> list[Entry]:
    """What is to be measured with some number of workers."""
    found = []
    for backend in backends:
        if BACKENDS[backend].in_stages:
            found += [Entry(backend, s, m) for m in microbatches for s in schedules]
        else:
            found.append(Entry(backend, WHOLE, 1))
    return found
