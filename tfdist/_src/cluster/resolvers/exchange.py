"""Exchanges the addresses of the workers through rank 0, if the engine does not provide them."""

import dataclasses
import functools
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable

from tfdist._src.cluster.cluster_spec import Topology, Worker, split
from tfdist._src.cluster.net import dns
from tfdist._src.cluster.net.dns import check_resolvable, resolve
from tfdist._src.cluster.net.listener import bind, check_own, local_addresses
from tfdist._src.cluster.net.wait_messages import Announce, WaitMessages
from tfdist._src.cluster.rendezvous.rendezvous import meet
from tfdist._src.cluster.resolvers import slurm
from tfdist._src.cluster.resolvers.found import AddressExchange, ResolvedJob
from tfdist._src.cluster.session.session import Session
from tfdist._src.log import logger
from tfdist._src.options import Options
from tfdist.errors import ClusterError, RendezvousError

_PAUSE_SECONDS = 0.5


def await_names(topology: Topology, options: Options, announce: Announce) -> None:
    """Waits until the host names of this worker and of rank 0 resolve.

    At the timeout, this function returns without an error. The code that needs the host name later
    raises an error.

    Args:
        topology: the workers, with their addresses.
        options: the job's options. `start_timeout` limits the wait.
        announce: called with each progress message.
    """
    if not topology.workers:
        return
    waits = WaitMessages(topology.me, options.start_timeout, announce)
    end = time.monotonic() + options.start_timeout
    for worker, what in ((topology.me, "its own name"), (topology.chief, str(topology.chief))):
        while not _resolves(worker.address) and time.monotonic() < end:
            waits.report(functools.partial("{} to resolve".format, what))
            time.sleep(_PAUSE_SECONDS)


def _resolves(address: str) -> bool:
    try:
        dns.resolve(address)
    except OSError:
        return False
    return True


_LOOPBACK = "127.0.0.1"
_SECRET_BYTES = 32
_reserved: list[socket.socket] = []
"""Sockets that keep the ports of this process from being assigned to others."""


def complete(
    found: ResolvedJob, options: Options, announce: Announce = logger.info
) -> tuple[Topology, Options]:
    """Completes the addresses and the secret of a job; all workers must call this.

    The workers connect to rank 0, and each worker sends the address at which it will listen. If the
    options contain no secret, rank 0 creates one, but only if the engine can send the secret to the
    processes of the job without revealing it to other users.

    Args:
        found: the result of a resolver. If it contains all addresses, nothing is exchanged.
        options: see `meet`.
        announce: see `meet`.

    Returns:
        The workers with their addresses, and the options with the secret of the job.

    Raises:
        ClusterError, TlsError, RendezvousError: see `meet`.
    """
    how, topology = found.exchange, found.topology
    if how is None:
        if found.late_names:
            await_names(topology, options, announce)
        return topology, options
    meeting, options = _learn_meeting(how, topology, options)
    workers = (_at(topology.chief, meeting), *topology.workers[1:])
    topology = dataclasses.replace(topology, workers=workers)
    if topology.rank == 0 and how.share is None:
        _check_meeting(topology.chief)
    seals = how.seals and not (options.secret or options.tls)
    # Other users cannot decrypt a sealed secret. It may therefore be sent over a connection that is
    # not authenticated.
    open_options = dataclasses.replace(options, security="none") if seals else options
    session = meet(topology, open_options, announce=announce)
    try:
        mine = meeting if session.rank == 0 else _address(meeting, how)
        answers = map(json.loads, session.exchange("addresses", json.dumps([mine, seals]).encode()))
        addresses, sealing = zip(*answers, strict=True)
        if all(sealing):
            options = dataclasses.replace(options, secret=_sealed_secret(session))
    finally:
        session.close()
    workers = tuple(map(_at, topology.workers, addresses))
    return dataclasses.replace(topology, workers=workers), options


def _at(worker: Worker, address: str) -> Worker:
    return dataclasses.replace(worker, address=address)


def _sealed_secret(session: Session) -> str:
    """Creates a secret on rank 0, and sends it to all ranks; only this user can decrypt it."""
    secret = secrets.token_hex(_SECRET_BYTES) if session.rank == 0 else ""
    sealed = slurm.seal(secret) if secret else ""
    first, *_ = session.exchange("secret", sealed.encode())
    return secret or slurm.unseal(first.decode())


def _learn_meeting(
    how: AddressExchange, topology: Topology, options: Options
) -> tuple[str, Options]:
    """Returns the address of rank 0, and the options with the job's secret.

    If the engine can send a text to all workers (`AddressExchange.share`), rank 0 chooses its
    address, creates a secret if there is none, and sends both.
    """
    if how.share is None:
        return how.meeting, options
    text = ""
    if topology.rank == 0:
        host = _LOOPBACK if how.one_host else _reachable_address()
        secret = options.secret or secrets.token_hex(_SECRET_BYTES)
        text = json.dumps([_reserve(host), secret], separators=(",", ":"))
    meeting, secret = json.loads(_shared(how.share, text, options.start_timeout))
    return meeting, dataclasses.replace(options, secret=options.secret or secret)


def _shared(share: Callable[[str], str], text: str, seconds: float) -> str:
    """Sends rank 0's text to all workers through the engine, with a timeout.

    The engine itself would wait for missing workers forever.
    """
    answers: list[str | Exception] = []

    def run() -> None:
        try:
            answers.append(share(text))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run, name="tfdist-share", daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise RendezvousError(
            f"not all workers have reported to their launcher within {seconds:g} s. See the other "
            "workers' output, or increase TFDIST_START_TIMEOUT."
        )
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _check_meeting(chief: Worker) -> None:
    try:
        check_own(chief.address, name=str(chief))
    except ClusterError as error:
        raise ClusterError(
            f"{error} MASTER_ADDR and MASTER_PORT must be the address of rank 0, the same on all "
            "workers."
        ) from None


def _address(meeting: str, how: AddressExchange) -> str:
    """Reserves an address at which this worker can listen, and returns it.

    The address belongs to the network interface that connects this worker to rank 0.
    """
    (family, sockaddr), *_ = resolve(meeting)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(sockaddr)
        host = probe.getsockname()[0]
    # If rank 0 runs on this host, other hosts can reach this host by the name in rank 0's address.
    return _reserve(split(meeting)[0] if host == sockaddr[0] and not how.one_host else host)


def _reserve(host: str) -> str:
    """Returns an address with a free port, which this process reserves until it ends."""
    name = f"[{host}]" if ":" in host else host
    any_port = f"{name}:1"
    bound = bind(any_port, check_resolvable(any_port), 0)
    _reserved.extend(bound[:1])
    for other in bound[1:]:
        other.close()
    return f"{name}:{bound[0].getsockname()[1]}"


def _reachable_address() -> str:
    """Returns the IP address at which other hosts can most likely reach this host.

    This is the address of the network interface that the default route uses.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return next(iter(local_addresses()), _LOOPBACK)
