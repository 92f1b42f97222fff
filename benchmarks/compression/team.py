"""The workers of one codec, one on each host, started once and asked for some steps at a time."""

from __future__ import annotations

import sys
from statistics import mean

from benchmarks.all_reduce.hosts import Hosts
from benchmarks.compression.turn import Turn
from benchmarks.step_time.members import Members


class Team(Members):
    """Workers of one codec that sleep until they are asked for steps.

    Args:
        codec: a name of `codecs`.
        model: a key of `TASKS`.
        hosts: for each worker its own.
        port: where the workers meet, free on each host.
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
        """Takes steps on all workers at once.

        Returns:
            The seconds of the slowest worker, the mean of what each has sent, and what the first
            one says of the rest, in which they are equal.

        Raises:
            TeamError: a worker failed or gave no answer.
        """
        turns: list[Turn] = self.ask(count)
        return Turn(
            max(turn.seconds for turn in turns),
            mean(turn.sent_bytes for turn in turns),
            turns[0].loss,
            turns[0].chosen,
        )
