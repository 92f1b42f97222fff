"""The workers of one codec, one on each host, which are started once and train on request."""

from __future__ import annotations

import sys
from statistics import mean

from benchmarks.all_reduce.hosts import Hosts
from benchmarks.compression.turn import Turn
from benchmarks.step_time.members import Members


class Team(Members):
    """Workers of one codec that sleep until steps are requested.

    Args:
        codec: a name in `codecs`.
        model: a key of `TASKS`.
        hosts: a host for each worker.
        port: the port at which the workers meet; it is free on each host.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, codec: str, model: str, hosts: Hosts, port: int, timeout: float) -> None:
        addresses = [f"{address}:{port}" for address in hosts.addresses]
        order = {"codec": codec, "model": model, "addresses": addresses}
        ranks = range(hosts.count)
        super().__init__(
            [
                [*hosts.prefix(rank), sys.executable, "-m", "benchmarks.compression.worker"]
                for rank in ranks
            ],
            [{**order, "rank": rank} for rank in ranks],
            timeout,
        )

    def steps(self, count: int) -> Turn:
        """Takes steps on all workers concurrently.

        Returns:
            The seconds of the slowest worker, the mean of the bytes that the workers have sent, and
            the loss and the codec, which are the same on all workers.

        Raises:
            TeamError: a worker failed or did not answer.
        """
        turns: list[Turn] = self.ask(count)
        return Turn(
            max(turn.seconds for turn in turns),
            mean(turn.sent_bytes for turn in turns),
            turns[0].loss,
            turns[0].chosen,
        )
