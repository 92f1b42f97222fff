"""Exchanges the workers' addresses at rank 0, for engines that do not publish them."""

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
    """Waits until the names of this worker and rank 0 resolve.

    At the timeout it returns normally: the code that needs the name raises the error.

    Args:
        topology: the workers, with their addresses.
        options: `start_timeout` limits the wait.
        announce: called occasionally with a line about the wait.
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
    """Completes a resolver's result; called by all workers.

    The workers meet at rank 0, and each sends the address at which it will listen. If the settings
    have no secret, rank 0 creates one, provided the engine can pass it to the job's processes only.

    Args:
        found: the job; if all addresses are known, nothing is exchanged.
        options: see `meet`.
        announce: see `meet`.

    Returns:
        The workers with their addresses, and the settings with the job's secret.

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
    # A sealed secret is useless to other users, so strangers may receive it.
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
    """Returns a secret that rank 0 has created, and sealed for processes of this user."""
    secret = secrets.token_hex(_SECRET_BYTES) if session.rank == 0 else ""
    sealed = slurm.seal(secret) if secret else ""
    first, *_ = session.exchange("secret", sealed.encode())
    return secret or slurm.unseal(first.decode())


def _learn_meeting(
    how: AddressExchange, topology: Topology, options: Options
) -> tuple[str, Options]:
    """Returns rank 0's address, and the options with any secret shared through the engine."""
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
    """Returns rank 0's text, shared through the engine; limits the wait, as the engine does not."""
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
    """Returns the address at which this worker will listen, on its interface to rank 0."""
    (family, sockaddr), *_ = resolve(meeting)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(sockaddr)
        host = probe.getsockname()[0]
    # If rank 0 is on this host, other hosts know the host by rank 0's name.
    return _reserve(split(meeting)[0] if host == sockaddr[0] and not how.one_host else host)


def _reserve(host: str) -> str:
    """Returns an address with a free port, which stays reserved from now on."""
    name = f"[{host}]" if ":" in host else host
    any_port = f"{name}:1"
    bound = bind(any_port, check_resolvable(any_port), 0)
    _reserved.extend(bound[:1])
    for other in bound[1:]:
        other.close()
    return f"{name}:{bound[0].getsockname()[1]}"


def _reachable_address() -> str:
    """Returns the address of this host that others most likely reach: that of the default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return next(iter(local_addresses()), _LOOPBACK)
