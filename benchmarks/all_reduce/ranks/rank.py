"""A rank in Python: executes the driver's commands, and sleeps in a read between them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

# The values are small integers, so that sums are exact. Their period is prime, so that shifted
# values are detected.
PERIOD = 251


class Arguments(NamedTuple):
    """The arguments of a rank's command line.

    Attributes:
        control: the path of the driver's socket.
        rank: the rank of this process.
        addresses: the addresses of all ranks.
        hosts: for each rank, the number of its host.
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
        """The factor between the pattern and the expected sum."""
        return self.size * (self.size + 1) // 2


def read_arguments() -> Arguments:
    """Returns the last four arguments of the command line."""
    control, rank, addresses, hosts = sys.argv[-4:]
    return Arguments(control, int(rank), addresses.split(","), list(map(int, hosts.split(","))))


def serve(arguments: Arguments, check: Callable[[int], int], time: Callable[[int], float]) -> None:
    """Executes commands until the driver closes the connection, and then ends the process.

    Args:
        arguments: the arguments of the command line.
        check: takes a number of bytes, reduces known values, and returns the number of wrong
            elements.
        time: takes a number of repetitions, and returns their total seconds.
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
    # The frameworks' own shutdown would wait for peers that are also ending.
    os._exit(0)
