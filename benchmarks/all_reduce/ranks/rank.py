"""A rank in Python: connects to the driver and does what it says, asleep in a read in between."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

# Small whole numbers, so that sums are exact; a prime period, so that no displacement fits.
PERIOD = 251


class Arguments(NamedTuple):
    """What the command line tells a rank.

    Attributes:
        control: the path of the driver's socket.
        rank: of this process.
        addresses: of all ranks.
        hosts: for each rank the number of its host.
    """

    control: str
    rank: int
    addresses: list[str]
    hosts: list[int]

    @property
    def size(self) -> int:
        return len(self.addresses)

    @property
    def factor(self) -> int:
        """What comes out is the pattern times this."""
        return self.size * (self.size + 1) // 2


def read_arguments() -> Arguments:
    """The last four arguments of the command line."""
    control, rank, addresses, hosts = sys.argv[-4:]
    return Arguments(control, int(rank), addresses.split(","), list(map(int, hosts.split(","))))


def serve(arguments: Arguments, check: Callable[[int], int], time: Callable[[int], float]) -> None:
    """Serves until the driver hangs up, then ends the process.

    Args:
        arguments: of the command line.
        check: takes bytes, reduces known values, returns the number of wrong elements.
        time: takes repetitions, returns the seconds of all.
    """
    orders: dict[str, Callable[[int], Any]] = {"check": check, "time": time}
    driver = socket.socket(socket.AF_UNIX)
    driver.connect(arguments.control)
    driver.sendall(f"{arguments.rank}\n".encode())
    for line in driver.makefile("r"):
        order, number = line.split()
        try:
            answer = str(orders[order](int(number)))
        except Exception as error:
            answer = "error " + f"{type(error).__name__}: {error}".splitlines()[0]
        driver.sendall(f"{answer}\n".encode())
    # Frameworks take their time to say goodbye to peers that leave too.
    os._exit(0)
