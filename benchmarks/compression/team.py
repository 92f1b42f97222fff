"""Starts one worker on each host to train with a codec. The workers take steps on request."""

from __future__ import annotations

import sys
from statistics import mean

from benchmarks.all_reduce.hosts import Hosts
from benchmarks.compression.turn import Turn
from benchmarks.step_time.members import Members


class Team(Members):
    """The workers of one codec, which sleep until the driver requests steps.

    Args:
        codec: a name in `codecs.KNOWN`.
        model: a key of `TASKS`.
        hosts: the hosts; each has one worker.
        port: the port in the address of every worker. It must be free on all hosts.
        timeout: the maximum time to wait for an answer, in seconds.
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
            The time of the slowest worker; the mean over the workers of the bytes that they have
            sent; and the loss and the codec of the first worker. The other workers have the same
            loss and the same codec.

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
