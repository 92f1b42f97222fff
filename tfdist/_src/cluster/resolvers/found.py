"""The result of a resolver: the workers of a job, and how they exchange their addresses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist.errors import ClusterError


@dataclass(frozen=True)
class AddressExchange:
    """How the workers exchange their addresses if the engine does not provide them.

    Attributes:
        meeting: the `"host:port"` at which rank 0 listens. "" if rank 0 chooses its own address.
        share: a function that all workers call with a text. It uses the engine to send the text of
            rank 0 to all workers, and returns that text. None if the engine cannot do this.
        seals: whether the engine has a service (MUNGE) that can encrypt the secret for one user.
        one_host: whether all workers run on this host.
    """

    meeting: str = ""
    share: Callable[[str], str] | None = None
    seals: bool = False
    one_host: bool = False


@dataclass(frozen=True)
class ResolvedJob:
    """The job of this process, as described by the environment variables.

    Attributes:
        engine: the engine that started the job, such as `"Slurm"`. "" if no job has been found.
        topology: the workers of the job. If `exchange` is not None, some addresses are unknown.
        exchange: how the workers exchange their addresses. None if all addresses are known.
        late_names: whether the host name of a worker may resolve only after the worker has started.
    """

    engine: str = ""
    topology: Topology = field(default_factory=Topology)
    exchange: AddressExchange | None = None
    late_names: bool = False


def numbered(engine: str, rank: int, size: int, exchange: AddressExchange) -> ResolvedJob:
    """Returns the job of an engine that provides only ranks and the number of workers.

    Args:
        engine: the name of the engine.
        rank: the rank of this process.
        size: the number of workers.
        exchange: how the workers exchange their addresses. A single worker does not need this.
    """
    if size == 1:
        return ResolvedJob(engine)
    first = Worker("worker", 0, exchange.meeting)
    workers = (first, *(Worker("worker", number, "") for number in range(1, size)))
    return ResolvedJob(engine, Topology(workers, rank, "worker", rank), exchange)


def rank_and_size(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    """Reads the rank of this process and the number of processes from environment variables.

    Args:
        environ: the environment variables.
        rank: the name of the variable with the rank.
        size: the name of the variable with the number of processes.

    Raises:
        ClusterError: a variable is missing or not a number, or the two contradict each other.

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
    """Reads an environment variable that must be an integer >= 0.

    Raises:
        ClusterError: the variable is missing, or it is not such an integer.
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
