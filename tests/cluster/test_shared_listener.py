"""The thread that listens while a job runs survives what its services and callers do."""

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.cluster.auth.identity import REGROUP, Identity
from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist._src.cluster.membership.calls import Call, Calls
from tfdist._src.cluster.membership.membership import listen
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.membership.view import View, encode_member
from tfdist._src.cluster.rendezvous.shared_listener import SharedListener
from tfdist._src.options import Options

SECONDS = 60.0
OPTIONS = Options(secret="s")


@pytest.fixture
def listener(addresses):
    """A listener, its lines, and a function that asks it something."""
    topology = Topology((Worker("worker", 0, *addresses(1)),))
    lines = []
    one = SharedListener(topology, OPTIONS, "nobody is answered", lines.append)
    calls = Calls(topology, OPTIONS)

    def ask(**header):
        call = Call(calls, topology.me.address, header)
        answer = call.run(lambda frame: frame["kind"] != "wait", SECONDS)
        call.close()
        return answer

    yield one, topology, lines, ask
    one.pause()


def broken(*_):
    raise RuntimeError("broken")


def test_a_caller_that_causes_an_error_is_dropped_alone(listener, capsys):
    one, topology, lines, ask = listener
    node = Node(topology, OPTIONS)
    node.learn(View(0, (node.member,)))
    listen(one, node, topology)
    one.resume()
    newcomer = Node(topology, OPTIONS).member
    verdicts = []
    for judge, said in (
        ({}.__getitem__, ""),
        (broken, "RuntimeError: broken"),
        (lambda request: verdicts.pop() if verdicts else broken(), "RuntimeError: broken"),
    ):
        node.judge = judge
        verdicts[:] = ["", ""]  # those of the last judge, which fails only while the caller waits
        with pytest.raises(OSError):
            ask(kind="join", member=encode_member(newcomer), request="")
        assert ask(kind="who")["kind"] == "member"
        assert said in (printed := capsys.readouterr().err) and bool(said) == bool(printed)
    assert not lines
    node.close(keep_record=False)


class Broken:
    """A service that fails in one of its functions, until it is mended."""

    is_busy = False

    def __init__(self, topology, name):
        self.identity = Identity.of(topology, REGROUP)
        self.accepted = 0
        setattr(self, name, broken)

    def admit(self, sock, hello):
        self.accepted += 1
        sock.close()

    def tick(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("name", ["admit", "tick"])
def test_an_error_of_a_service_does_not_end_the_others(listener, name, capsys, until):
    one, topology, lines, ask = listener
    service = Broken(topology, name)
    one.serve(REGROUP, lambda selector, wake: service, 1)
    one.resume()
    for _ in range(20):
        with pytest.raises(OSError):
            ask(kind="who")
    if name == "admit":
        del service.admit
        with pytest.raises(OSError):
            ask(kind="who")
    until(lambda: service.accepted == (20 if name == "tick" else 1))
    said = capsys.readouterr().err.count("RuntimeError: broken")
    assert 0 < said <= 10
    assert not lines


@exhaustive
def test_it_listens_again_after_an_error_that_ends_it(listener, until):
    one, topology, lines, ask = listener
    node = Node(topology, OPTIONS)
    one.serve("another", broken, 1)
    listen(one, node, topology)
    one.resume()
    until(lambda: lines)
    assert "nobody is answered any longer: RuntimeError('broken')" in lines[0]
    one._thread.join()
    one._services.pop("another")
    one.resume()
    assert ask(kind="who")["kind"] == "member"
    node.close(keep_record=False)
