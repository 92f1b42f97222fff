"""The result of a resolver: the job's workers, and how they exchange their addresses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist.errors import ClusterError


@dataclass(frozen=True)
class AddressExchange:
    """How workers exchange addresses if the engine does not publish them.

    Attributes:
        meeting: the `"host:port"` at which rank 0 listens; "" if it chooses an address.
        share: sends rank 0's text to all workers through the engine; called by all of them.
        seals: whether the engine has a service (MUNGE) that authenticates its users to each other.
        one_host: whether all workers run on this host.
    """

    meeting: str = ""
    share: Callable[[str], str] | None = None
    seals: bool = False
    one_host: bool = False


@dataclass(frozen=True)
class ResolvedJob:
    """A process's job, as its environment describes it.

    Attributes:
        engine: the engine that started the job, such as `"Slurm"`; "" if no job has been found.
        topology: the workers; with an `exchange`, their addresses are not known yet.
        exchange: how the workers exchange addresses; None if these are known.
        late_names: whether the workers' names may not resolve before the workers run.
    """

    engine: str = ""
    topology: Topology = field(default_factory=Topology)
    exchange: AddressExchange | None = None
    late_names: bool = False


def numbered(engine: str, rank: int, size: int, exchange: AddressExchange) -> ResolvedJob:
    """Returns the workers of an engine that gives each process its rank and the group's size.

    Args:
        engine: its name.
        rank: the rank of this process.
        size: the number of workers; a single one needs no exchange.
        exchange: how they exchange their addresses.
    """
    if size == 1:
        return ResolvedJob(engine)
    first = Worker("worker", 0, exchange.meeting)
    workers = (first, *(Worker("worker", number, "") for number in range(1, size)))
    return ResolvedJob(engine, Topology(workers, rank, "worker", rank), exchange)


def rank_and_size(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    """Reads this process's rank and the number of processes from two variables.

    Raises:
        ClusterError: a variable is missing or not a number, or they contradict each other.

    Example:
        >>> rank_and_size({"RANK": "1", "WORLD_SIZE": "2"}, "RANK", "WORLD_SIZE")
        (1, 2)
    """
    mine, all_of_them = number(environ, rank), number(environ, size)
    if mine >= all_of_them:
        raise ClusterError(
            f"{rank} and {size} contradict each other: a rank is below the number of processes. "
            f"Received: {rank}={mine}, {size}={all_of_them}. Unset both if they are left over from "
            f"another program, or correct them."
        )
    return mine, all_of_them


def number(environ: Mapping[str, str], name: str) -> int:
    """Reads a variable that is a number.

    Raises:
        ClusterError: it is missing, or not a number.
    """
    text = environ.get(name)
    if text is None:
        raise ClusterError(
            f"{name} is not set, while other variables of its engine are. Start the processes with "
            f"the engine's own launcher, or set TF_CONFIG."
        )
    if not (text.isascii() and text.isdecimal()):
        raise ClusterError(
            f"{name} must be an integer >= 0. Received: {text!r}. Start the processes with the "
            f"engine's own launcher, or set TF_CONFIG."
        )
    return int(text)
