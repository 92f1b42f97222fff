"""Workers that know no addresses tell theirs to rank 0, and get a secret if there can be one."""

from __future__ import annotations

import dataclasses
import queue
import socket
import threading

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive
from tfdist._src.cluster import complete
from tfdist._src.cluster.resolvers import exchange, slurm
from tfdist._src.cluster.resolvers.found import AddressExchange, numbered
from tfdist._src.options import Options
from tfdist.errors import ClusterError, RendezvousError

pytestmark = exhaustive
OPTIONS = Options(start_timeout=FAR, security="none")


def found(rank, size, how):
    return numbered("test", rank, size, how)


class Store:
    """What a launcher passes on."""

    def __init__(self, size):
        self._texts, self._barrier = queue.Queue(), threading.Barrier(size)
        self._text = ""

    def share(self, text):
        if text:
            self._text = text
        self._barrier.wait(FAR)
        return self._text


def check(answers, size):
    """All have the same workers; returns the addresses, and the secrets."""
    for rank, (topology, _) in enumerate(answers):
        assert topology.rank == rank
        assert topology.workers == answers[0][0].workers
    addresses = [worker.address for worker in answers[0][0].workers]
    assert len(set(addresses)) == size and all(addresses)
    return addresses, [options.secret for _, options in answers]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_known_meeting(in_parallel, addresses, host):
    how = AddressExchange(meeting=addresses(1, host)[0], one_host=True)
    answers = in_parallel(lambda rank: complete(found(rank, 3, how), OPTIONS), range(3))
    all_addresses, secrets = check(answers, 3)
    assert all_addresses[0] == how.meeting
    assert secrets == [""] * 3
    for address in all_addresses[1:]:
        assert address.rpartition(":")[0] == how.meeting.rpartition(":")[0]


@pytest.mark.parametrize("given", ["", "mine"])
def test_a_launcher_that_passes_on_texts(in_parallel, given):
    how = AddressExchange(share=Store(3).share, one_host=True)
    options = dataclasses.replace(OPTIONS, secret=given)
    answers = in_parallel(lambda rank: complete(found(rank, 3, how), options), range(3))
    _, secrets = check(answers, 3)
    assert len(set(secrets)) == 1
    assert secrets[0] == given or (not given and len(secrets[0]) == 64)


@pytest.mark.parametrize("without", [None, 1])
def test_a_secret_that_is_sealed(in_parallel, monkeypatch, addresses, without):
    monkeypatch.setattr(slurm, "seal", lambda secret: secret[::-1])
    monkeypatch.setattr(slurm, "unseal", lambda sealed: sealed[::-1])
    [meeting] = addresses(1)

    def join(rank):
        return complete(found(rank, 3, AddressExchange(meeting, seals=rank != without)), OPTIONS)

    _, secrets = check(in_parallel(join, range(3)), 3)
    assert len(set(secrets)) == 1
    assert bool(secrets[0]) == (without is None)


def test_a_meeting_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        how = AddressExchange(meeting=f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(ClusterError, match=r"is in use by .*MASTER_PORT must be the address"):
            complete(found(0, 2, how), OPTIONS)


def test_a_launcher_that_does_not_answer():
    never = threading.Event()
    how = AddressExchange(share=lambda text: str(never.wait()))
    options = dataclasses.replace(OPTIONS, start_timeout=0.2)
    with pytest.raises(RendezvousError, match=r"have reported to their launcher within 0\.2 s"):
        complete(found(1, 2, how), options)
    never.set()


def test_an_error_of_the_launcher_is_raised():
    def share(text):
        raise ClusterError("no store")

    with pytest.raises(ClusterError, match="no store"):
        complete(found(1, 2, AddressExchange(share=share)), OPTIONS)


def test_an_address_for_other_hosts(monkeypatch):
    address = exchange._reachable_address()
    assert address
    monkeypatch.setattr(exchange, "local_addresses", list)

    def unreachable(self, address):
        raise OSError("no route")

    class Probe(socket.socket):
        connect = unreachable

    monkeypatch.setattr(exchange.socket, "socket", Probe)
    assert exchange._reachable_address() == "127.0.0.1"
