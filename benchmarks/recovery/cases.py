"""The cases that the benchmark compares: ways to continue training after a fault.

This module also contains the command that starts the job of a case.
"""

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
# For each value of `--respawn`, the arguments of `tfdist run`. With "no", the launcher does not
# replace a lost worker.
ELASTIC_FLAGS = {"yes": ["--elastic"], "no": ["--elastic", "--max-restarts", "0"]}
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Order:
    """The argument of a worker's script, `keras_script.py` or `torch_script.py`.

    Attributes:
        backend: a key of `BACKENDS`.
        model: a key of `sizes.HIDDEN`.
        workers: the initial number of workers.
        folder: the folder of the job's files.
        save_every: the number of steps between two saved states.
        silence: the timeout of torch's process group, in seconds. tfdist does not use this field:
            it gets the same number from the environment variables of `settings`.
    """

    backend: str
    model: str
    workers: int
    folder: str
    save_every: int
    silence: float

    @property
    def notes(self) -> str:
        """The folder in which each worker records its events; see `marks`."""
        return str(Path(self.folder) / "notes")

    @property
    def saved(self) -> str:
        """The folder in which the workers save the state of training."""
        return str(Path(self.folder) / "saved")


@dataclass(frozen=True)
class Case:
    """A way to continue training after a fault.

    Attributes:
        backend: a key of `BACKENDS`.
        respawn: for `elastic`, whether the launcher replaces a lost worker: "yes" or "no". For
            other backends, "".
    """

    backend: str
    respawn: str = ""

    def command(self, order: Order, torch_python: str) -> list[str]:
        """Returns the command that starts a job, with the launcher of this backend.

        Args:
            order: the argument of the workers' script.
            torch_python: the Python interpreter for `torchrun`.
        """
        return [
            torch_python if self.backend == "torchrun" else sys.executable,
            *BACKENDS[self.backend],
            *(ELASTIC_FLAGS[self.respawn] if self.respawn else ["--max-restarts", "1"]),
            *(["--nproc-per-node"] if self.backend == "torchrun" else ["-n"]),
            str(order.workers),
            str(FOLDER / ("torch_script.py" if self.backend == "torchrun" else "keras_script.py")),
            json.dumps(asdict(order)),
        ]


# For each backend, the arguments with which a Python interpreter runs the launcher.
BACKENDS = {
    "elastic": ["-m", "tfdist", "run"],
    "restart": ["-m", "tfdist", "run"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
}


def cases(backends: Sequence[str], respawn: Sequence[str]) -> list[Case]:
    """Returns the cases to compare: `elastic` with each value of `respawn`, and other backends."""
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
    """Returns the environment variables for the launcher and all workers.

    Args:
        silence: the time in seconds after which an unresponsive worker counts as lost.
    """
    return {
        "TFDIST_HEARTBEAT_TIMEOUT": str(silence),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",  # torchrun sets the same value.
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
