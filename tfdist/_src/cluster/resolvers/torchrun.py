"""torchrun and Kubeflow's PyTorchJob, which set RANK, WORLD_SIZE and MASTER_ADDR."""

from collections.abc import Mapping

from tfdist._src.cluster.resolvers import found
from tfdist.errors import ClusterError

_DEFAULT_PORT = "29500"


def master(environ: Mapping[str, str], host: str = "", port: int | str = _DEFAULT_PORT) -> str:
    """Returns the `"host:port"` of rank 0 from MASTER_ADDR and MASTER_PORT.

    Args:
        environ: the environment variables.
        host: the default value of MASTER_ADDR; "" for no default.
        port: the default value of MASTER_PORT.

    Returns:
        The address; "" if MASTER_ADDR is not set and has no default.

    Raises:
        ClusterError: MASTER_PORT is not a number.

    Example:
        >>> master({"MASTER_ADDR": "10.0.0.1"})
        '10.0.0.1:29500'
    """
    host = environ.get("MASTER_ADDR") or host
    if not host:
        return ""
    port = found.number({"MASTER_PORT": environ.get("MASTER_PORT") or str(port)}, "MASTER_PORT")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(environ: Mapping[str, str]) -> found.ResolvedJob | None:
    """Returns the job of this process; None if RANK and WORLD_SIZE are not set.

    Raises:
        ClusterError: a variable is missing or invalid, or the variables contradict each other.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    rank, size = found.rank_and_size(environ, "RANK", "WORLD_SIZE")
    if size == 1:
        return found.ResolvedJob("torchrun")
    meeting = master(environ)
    if not meeting:
        raise ClusterError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but not MASTER_ADDR, the address of rank "
            "0. Set it and MASTER_PORT; or unset RANK and WORLD_SIZE to train alone."
        )
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, _, port = meeting.rpartition(":")  # torchrun itself listens at this port
        meeting = f"{host}:{int(port) + 1}"
    local = environ.get("LOCAL_WORLD_SIZE") == str(size)
    return found.numbered("torchrun", rank, size, found.AddressExchange(meeting, one_host=local))
