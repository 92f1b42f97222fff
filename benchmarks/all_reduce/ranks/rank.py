"""A rank in Python: connects to the driver and executes its commands; see `team.Team`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

# The checked values are 1, 2, ..., `PERIOD`, 1, 2, and so on. They are small integers, so that sums
# are exact. Their period is a prime number, so that the check detects values at wrong positions.
PERIOD = 251


class Arguments(NamedTuple):
    """The arguments of a rank's command line.

    Attributes:
        control: the path of the Unix socket at which the driver listens.
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
        """The sum of 1, 2, ..., `size`.

        Rank i contributes the known values multiplied by i + 1. So the result must be the known
        values multiplied by `factor`.
        """
        return self.size * (self.size + 1) // 2


def read_arguments() -> Arguments:
    """Parses the last four arguments of the command line."""
    control, rank, addresses, hosts = sys.argv[-4:]
    return Arguments(control, int(rank), addresses.split(","), list(map(int, hosts.split(","))))


def serve(arguments: Arguments, check: Callable[[int], int], time: Callable[[int], float]) -> None:
    """Executes commands until the driver closes the connection, and then ends the process.

    Args:
        arguments: the arguments of the command line.
        check: a function that takes a number of bytes, reduces a vector of this size with known
            values, and returns the number of wrong elements.
        time: a function that takes a number of repetitions, reduces a vector of zeros this many
            times, and returns the total time in seconds.
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
    # The normal shutdown of some frameworks waits for the other ranks, which are also exiting.
    os._exit(0)
