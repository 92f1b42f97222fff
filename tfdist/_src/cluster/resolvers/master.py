"""MASTER_ADDR and MASTER_PORT, by which scripts for PyTorch say where rank 0 is."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist._src.cluster.resolvers.found import number

_DEFAULT_PORT = "29500"


def master(environ: Mapping[str, str], host: str = "", port: int | str = _DEFAULT_PORT) -> str:
    """Where rank 0 listens, `"host:port"`; "" if that is not set.

    Args:
        environ: the variables.
        host: where MASTER_ADDR is not set.
        port: where MASTER_PORT is not set.

    Raises:
        ClusterError: the port is no number.

    Example:
        >>> master({"MASTER_ADDR": "10.0.0.1"})
        '10.0.0.1:29500'
    """
    host = environ.get("MASTER_ADDR") or host
    if not host:
        return ""
    port = number({"MASTER_PORT": environ.get("MASTER_PORT") or str(port)}, "MASTER_PORT")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
