"""How the GPUs that this process sees read each other's memory, by real copies."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum

# A process of its own: one that uses a broken link may hang for ever, and so may its end.
_PROGRAM = "tfdist._src.native.gpu_copies"
_COPY_SECONDS = 3.0


class Copy(str, Enum):
    """What has become of a copy."""

    INTACT = "intact"
    WRONG = "wrong"  # other bytes have arrived
    STUCK = "stuck"  # it does not end
    TAKEN = "taken"  # not tried, since another process has the GPU's memory
    FAILED = "failed"  # refused by the driver, or not tried


@dataclass(frozen=True)
class Link:
    """How one GPU reads another one's memory.

    Attributes:
        reader: the number of the GPU that reads.
        owner: that of the one whose memory it is.
        copy: what has become of a copy.
        direct: whether the reader reaches that memory; else copies pass through the host's.
        rank: the driver's rank of the link, 0 for the fastest; None where it does not tell.
        atomics: whether the GPU's atomic operations work on it, as over NVLink.
        speed: bytes per second of an intact copy.
        error: why a copy failed.
    """

    reader: int
    owner: int
    copy: Copy
    direct: bool = False
    rank: int | None = None
    atomics: bool = False
    speed: float = 0.0
    error: str = ""


def measure(library: str, gpus: int, seconds: float) -> list[Link]:
    """Tries all ordered pairs.

    Args:
        library: the driver's path or name; "" for the system's.
        gpus: how many there are.
        seconds: the time limit for all pairs together; those that are late have failed.
    """
    limit = str(min(_COPY_SECONDS, seconds / 2))
    try:
        done = subprocess.run(
            [sys.executable, "-m", _PROGRAM, library, limit],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
        printed, why = done.stdout, f"exit code {done.returncode}"
        if said := done.stderr.decode(errors="replace").strip():
            why = said.splitlines()[-1]
    except subprocess.TimeoutExpired as error:
        printed, why = error.stdout or b"", f"not tried within {seconds:g} s"
    links = {}
    for line in printed.decode(errors="replace").splitlines(keepends=True):
        if line.endswith("\n"):  # The last one may be cut off.
            values = json.loads(line)
            link = Link(**{**values, "copy": Copy(values["copy"])})
            links[link.reader, link.owner] = link
    return [
        links.get(pair) or Link(*pair, Copy.FAILED, error=why)
        for pair in itertools.permutations(range(gpus), 2)
    ]
