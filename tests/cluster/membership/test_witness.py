"""Launchers tell the workers of other hosts who is dead."""

import select
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.certificates import variables
from tests.harness.tiers import exhaustive
from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.consensus import AcceptorState
from tfdist._src.cluster.membership.liveness import LivenessResult, LivenessServer, ask, inspect
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.membership.record import here
from tfdist._src.options import Options

NEVER = {"TFDIST_HEARTBEAT_TIMEOUT": "3600"}


@pytest.fixture
def witness(addresses):
    """Makes a launcher tell of the deaths on a host; also gives what ends that."""
    ended = threading.Event()
    threads = []

    def serve(one):
        while not ended.is_set():
            select.select([one], [], [], 0.05)
            one.serve()
        one.close()

    def stand(options):
        one = LivenessServer(*addresses(1), options)
        threads.append(threading.Thread(target=serve, args=[one]))
        threads[-1].start()
        return one.address

    def end():
        ended.set()
        for thread in threads:
            thread.join()

    yield stand, end
    end()


@exhaustive
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(("count", "dead"), [(2, [0]), (4, [0, 1]), (4, [0, 1, 3])])
def test_those_of_another_host_go_on_without_the_dead(group, witness, count, dead, tls):
    secure = {"TFDIST_SECRET": "s", **(variables() if tls else {})}
    hosts = ["a", "a", "b", "b"] if count == 4 else ["a", "b"]
    told = {
        host: witness[0](Options.from_environment({**secure, "TFDIST_HOST": host}))
        for host in set(hosts)
    }
    special = [{"TFDIST_HOST": host, "TFDIST_WITNESS": told[host]} for host in hosts]
    _, workers = group(count, dict(enumerate(special)), **NEVER, **secure)
    for index in dead:
        workers[index].kill()
    left = [index for index in range(count) if index not in dead]
    for index in left:
        workers[index].until(f"members {','.join(map(str, left))}.")


@exhaustive
def test_nothing_is_proven_of_the_living_nor_of_others_nor_to_strangers(witness):
    stand, end = witness
    address = stand(Options(host="a", secret="s"))
    me, you = (Topology((Worker("worker", rank, f"w:{rank + 1}"),)) for rank in range(2))
    member = Node(me, Options(host="a")).member
    place = member.place
    dead = replace(member, place=replace(place, started=place.started + 1))
    calls = Calls(you, Options(secret="s"))
    assert ask(calls, address, member) == LivenessResult(alive=True)
    assert ask(calls, address, dead) == LivenessResult(True, AcceptorState())
    elsewhere = here(Options(host="b"))
    told = replace(member, place=replace(place, witness=address))
    assert inspect(calls, told, elsewhere) == LivenessResult(alive=True)
    assert inspect(calls, member, elsewhere, [address]) == LivenessResult(alive=True)
    assert inspect(calls, member, elsewhere) == LivenessResult()
    of_another = replace(dead, place=replace(dead.place, machine="another"))
    assert ask(calls, address, of_another) == LivenessResult()
    led_astray = replace(dead, place=replace(dead.place, record="/etc/hostname"))
    assert ask(calls, address, led_astray) == LivenessResult(True, None)
    assert ask(Calls(you, Options(secret="other")), address, dead) == LivenessResult()
    assert Path(place.record).exists()
    end()
    assert ask(calls, address, dead) == LivenessResult()
    assert not Path(place.record).exists()
