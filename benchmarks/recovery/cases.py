"""The ways to continue after a fault, which are compared, and how each is started."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
VICTIMS = ("last", "chief")
RESPAWN = ("yes", "no")
# The key is whether the launcher replaces a lost worker.
ELASTIC_FLAGS = {"yes": ["--elastic"], "no": ["--elastic", "--max-restarts", "0"]}
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Order:
    """The argument of a worker's script.

    Attributes:
        backend: a key of `BACKENDS`.
        model: a key of `sizes.HIDDEN`.
        workers: the initial number of workers.
        folder: the folder for notes and for saved states.
        save_every: the number of steps between two saved states.
        silence: for torch, seconds without a sign of life after which a worker counts as lost;
            tfdist reads environment variables instead.
    """

    backend: str
    model: str
    workers: int
    folder: str
    save_every: int
    silence: float

    @property
    def notes(self) -> str:
        """The folder for notes."""
        return str(Path(self.folder) / "notes")

    @property
    def saved(self) -> str:
        """The folder for saved states."""
        return str(Path(self.folder) / "saved")


@dataclass(frozen=True)
class Case:
    """One of the cases that are measured in turns.

    Attributes:
        backend: a key of `BACKENDS`.
        respawn: whether a lost worker is replaced: "yes" or "no"; "" for backends without a choice.
    """

    backend: str
    respawn: str = ""

    def command(self, order: Order, torch_python: str) -> list[str]:
        """Returns the command that starts the launcher of a job."""
        return [
            torch_python if self.backend == "torchrun" else sys.executable,
            *BACKENDS[self.backend],
            *(ELASTIC_FLAGS[self.respawn] if self.respawn else ["--max-restarts", "1"]),
            *(["--nproc-per-node"] if self.backend == "torchrun" else ["-n"]),
            str(order.workers),
            str(FOLDER / ("torch_script.py" if self.backend == "torchrun" else "keras_script.py")),
            json.dumps(asdict(order)),
        ]


# The launchers, as arguments of their Python interpreters.
BACKENDS = {
    "elastic": ["-m", "tfdist", "run"],
    "restart": ["-m", "tfdist", "run"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
}


def cases(backends: Sequence[str], respawn: Sequence[str]) -> list[Case]:
    """Returns the cases to compare: `elastic` with each value of `respawn`, the others once."""
    return [
        case
        for backend in dict.fromkeys(backends)
        for case in (
            [Case(backend, choice) for choice in dict.fromkeys(respawn)]
            if backend == "elastic"
            else [Case(backend)]
        )
    ]


def settings(silence: float) -> dict[str, str]:
    """Returns the environment variables of all workers.

    Args:
        silence: seconds without a sign of life after which a worker counts as lost.
    """
    return {
        "TFDIST_HEARTBEAT_TIMEOUT": str(silence),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",  # As torchrun sets it.
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
