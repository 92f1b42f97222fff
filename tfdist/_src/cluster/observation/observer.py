"""Asks the rank 0 of a running job how its workers are doing, as an observer."""

from __future__ import annotations

import time

from tfdist._src.cluster.auth.handshake import HELLO_SECONDS, handshake
from tfdist._src.cluster.auth.identity import OBSERVE, Identity
from tfdist._src.cluster.net.dns import resolve
from tfdist._src.cluster.net.framing import FRAME_LIMIT, WireError, read_frame
from tfdist._src.cluster.net.sockets import CONNECT_SECONDS, connect, why_unreachable
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.observation.answer import Seen, decode_answer
from tfdist._src.cluster.observation.answering import PATIENCE_SECONDS
from tfdist._src.options import Options
from tfdist.errors import ClusterError, RendezvousError

_ANSWER_SECONDS = PATIENCE_SECONDS + 10.0
_ME = "tfdist doctor"


def ask(address: str, options: Options) -> list[Seen]:
    """Asks once, without disturbing the job.

    Args:
        address: rank 0's `"host:port"`, as in the cluster of its workers.
        options: `secret` and the TLS options, those of the workers.

    Returns:
        The ranks in their order.

    Raises:
        ClusterError: the address is none, or the job has another secret or version of tfdist.
        TlsError: the two do not trust each other, or only one uses TLS.
        RendezvousError: nobody answers there, or something else than the rank 0 of a job.

    Example:
        >>> ask("10.0.0.1:8470", Options(secret="..."))[0].report["steps"]  # doctest: +SKIP
        1200
    """
    tls = Tls.load(options)
    mine = Identity.of_other(_ME, OBSERVE)
    name = f"rank 0 ({address})"
    now = time.monotonic()
    try:
        sock = connect(resolve(address), now + CONNECT_SECONDS)
    except OSError as error:
        raise RendezvousError(
            f"{address} cannot be asked: {why_unreachable(error)}. Pass the address of rank 0, the "
            f"first in TF_CONFIG, of a job that is training with the native collectives and has a "
            f"secret, TLS certificates, or loopback addresses only."
        ) from None
    try:
        if tls:
            sock = tls.wrap(sock, dialed=True)
        admit = _screen
        handshake(
            sock, mine, options.secret, now + HELLO_SECONDS, first=True, admit=admit, name=name
        )
        header, payload = read_frame(sock, FRAME_LIMIT, time.monotonic() + _ANSWER_SECONDS)
        if header["kind"] == "busy":
            raise RendezvousError(f"{name} is being asked by others already: try again.")
        return decode_answer(header, payload)
    except WireError as error:
        raise RendezvousError(
            f"{address} is not rank 0 of a job that can be asked: {error}. Pass the address of "
            f"rank 0, the first in TF_CONFIG; jobs that use TensorFlow's collectives, whose server "
            f"has that port, cannot be asked."
        ) from None
    except OSError as error:
        raise RendezvousError(
            f"{address} did not answer as rank 0 of a running job: {error}. While workers connect "
            f"to one another it cannot be asked; try again, or see its log."
        ) from None
    finally:
        sock.close()


def _screen(theirs: Identity) -> None:
    mine = Identity.of_other(_ME, OBSERVE).version
    if theirs.version != mine:
        raise ClusterError(
            f"{theirs} runs tfdist {theirs.version}, and this is {mine}: run the doctor of that "
            f"version."
        )
    if theirs.rank != 0 or theirs.purpose != OBSERVE:
        raise WireError(f"it is {theirs}, and this is not for observers")
