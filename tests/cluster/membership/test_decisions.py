"""The pure decisions as tables, and what is sent and recorded."""

import itertools
import json
from dataclasses import replace

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist._src.cluster.membership import record
from tfdist._src.cluster.membership.consensus import (
    Accept,
    Accepted,
    AcceptorState,
    Ballot,
    Decided,
    Prepare,
    Promise,
    Refused,
    Vote,
    is_hopeless,
    may_go_on,
)
from tfdist._src.cluster.membership.node import MembershipService, Node
from tfdist._src.cluster.membership.proposer import summary
from tfdist._src.cluster.membership.regrouping import say_farewell
from tfdist._src.cluster.membership.view import (
    Evidence,
    Member,
    Patience,
    ProcessIdentity,
    State,
    View,
    compose,
    decode_view,
    encode_view,
    leader,
)
from tfdist._src.cluster.membership.wire import (
    decode_acceptor,
    decode_reply,
    decode_request,
    encode_acceptor,
    encode_reply,
    encode_request,
)
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.options import Options


def member(name, address=""):
    return Member(Worker("worker", 0, address or f"{name}:1"), name, ProcessIdentity("m", 1, 1))


def view(names, generation=1):
    return View(generation, tuple(map(member, names)))


RULES = [
    ("a", "a", "", True),
    ("ab", "a", "", True),  # the first breaks the tie
    ("ab", "b", "", False),
    ("ab", "b", "a", True),
    ("abc", "ab", "", True),
    ("abc", "c", "", False),
    ("abc", "c", "a", False),  # b may be alive
    ("abc", "c", "ab", True),
    ("abcd", "ad", "", True),
    ("abcd", "bd", "", False),
    ("abcd", "bd", "ac", True),
    ("abcd", "bc", "d", True),  # more than half of those that may be alive
    ("abc", "b", "a", True),  # half of them, with the first
    ("abcd", "", "abcd", False),
    ("ab", "xyz", "a", False),  # strangers do not count
]


def test_who_may_go_on():
    for members, present, dead, expected in RULES:
        assert may_go_on(members, present, dead) == expected, (members, present, dead)
    assert is_hopeless("ab", "b", "", "a")
    assert not is_hopeless("ab", "a", "", "b")
    assert not is_hopeless("abc", "c", "a", "")  # b may come back
    assert is_hopeless("abc", "c", "b", "a")


@exhaustive
def test_two_parts_never_both_go_on_while_all_are_alive():
    for size in range(1, 8):
        everyone = "abcdefg"[:size]
        for count in range(size + 1):
            for part in itertools.combinations(everyone, count):
                rest = [one for one in everyone if one not in part]
                assert not (may_go_on(everyone, part, "") and may_go_on(everyone, rest, ""))


PATIENCE = Patience(refused=1.0, silent=10.0)


EVIDENCE = [
    (Evidence(), State.AWAITED),
    (Evidence(silent_since=91.0), State.AWAITED),
    (Evidence(silent_since=90.0), State.LOST),
    (Evidence(silent_since=99.0, refused_since=99.5), State.AWAITED),
    (Evidence(silent_since=99.0, refused_since=99.0), State.LOST),
    (Evidence(silent_since=99.0, refused_since=91.0, alive=True), State.AWAITED),
    (Evidence(silent_since=90.0, refused_since=91.0, alive=True), State.LOST),
    (Evidence(silent_since=91.0, sought=True), State.AWAITED),
    (Evidence(dead=True, silent_since=100.0), State.GONE),
    (Evidence(dead=True, last_word=True), State.DEAD),
    (Evidence(answered=True, silent_since=0.0), State.ANSWERED),
]
OF_SUSPECTS = [
    (Evidence(silent_since=98.0), State.AWAITED),
    (Evidence(silent_since=98.0, sought=True), State.LOST),
    (Evidence(silent_since=99.5, sought=True), State.AWAITED),
    (Evidence(silent_since=91.0, sought=True, alive=True), State.AWAITED),
    (Evidence(silent_since=90.0, sought=True, alive=True), State.LOST),
]
COMPOSED = [
    ("abc", "", None, "abc"),
    ("ca", "", None, "ac"),
    ("ac", "xy", None, "acxy"),
    ("ac", "yx", 3, "acy"),
    ("abc", "x", 2, "abc"),  # nobody is sent away
    ("ac", "a", None, "ac"),
]


def test_whom_to_wait_for_who_leads_and_who_belongs_to_the_next_view():
    for evidence, state in EVIDENCE:
        assert evidence.state(100.0, PATIENCE) is state, evidence
    for evidence, state in OF_SUSPECTS:
        assert evidence.state(100.0, replace(PATIENCE, unseen=1.0)) is state, evidence
    assert leader(view("abc"), "") == member("a")
    assert leader(view("abc"), "ab") == member("c")
    assert leader(view("abc"), "abc") is None
    for promised, joiners, most, expected in COMPOSED:
        found = compose(view("abc"), promised, list(map(member, joiners)), most)
        assert found == view(expected, 2), (promised, joiners, most)
    # A newcomer takes the address of a dead member only.
    newcomer = member("x", "b:1")
    assert compose(view("ab"), "ab", [newcomer], None) == view("ab", 2)
    assert compose(view("ab"), "a", [newcomer], None).members == (member("a"), newcomer)


@exhaustive
def test_the_line_about_a_new_group():
    states = {"b": State.DEAD, "c": State.LOST, "e": State.DEAD}
    assert summary(view("abcde"), view("adx", 2), states, "e") == (
        "worker 0 (b:1) is lost (is dead); worker 0 (c:1) is lost (does not answer); "
        "worker 0 (e:1) has left; worker 0 (x:1) joins; "
        "2 of 5 workers form generation 2 of 3 workers"
    )


VOTE = Vote(Ballot(3, 1), view("ab", 2))
ACCEPTOR_STATES = [
    AcceptorState(),
    AcceptorState(view("ab")),
    AcceptorState(view("ab"), Ballot(4, 0), VOTE, view("a")),
]


@exhaustive
def test_messages_survive_the_wire():
    def sent(header):
        return json.loads(json.dumps(header))

    for request in (Prepare(view("ab"), Ballot(1, 0)), Accept(view("ab"), Ballot(1, 0), view("a"))):
        assert decode_request(sent(encode_request(request))) == request
    for reply in (
        Promise(Ballot(1, 0), None),
        Promise(Ballot(1, 0), VOTE),
        Accepted(Ballot(1, 0)),
        Refused(Ballot(1, 0), Ballot(2, 1)),
        Decided(view("a")),
    ):
        assert decode_reply(sent(encode_reply(reply))) == reply
    for acceptor in ACCEPTOR_STATES:
        assert decode_acceptor(sent(encode_acceptor(acceptor))) == acceptor
    assert decode_reply({"kind": "member"}) is None


@exhaustive
def test_malformed_messages_are_refused():
    good = encode_view(view("ab"))
    twice = {**good, "members": good["members"][:1] * 2}
    unprintable = json.loads(json.dumps(good).replace("a:1", "a\\n:1"))
    for wrong in (None, 3, {}, {**good, "members": []}, {**good, "generation": "1"}, twice,
                  {**good, "members": [{}]}, unprintable):  # fmt: skip
        with pytest.raises(WireError):
            decode_view(wrong)
    for header in ({"kind": "prepare"}, {"kind": "prepare", "view": good, "ballot": [1]}):
        with pytest.raises(WireError):
            decode_request(header)
    with pytest.raises(WireError):
        decode_reply({"kind": "promise", "ballot": [0, 0], "accepted": 3})
    with pytest.raises(WireError):
        decode_acceptor([])


@exhaustive
def test_a_view_as_a_topology():
    topology = view("ab", 3).topology(1)
    assert (topology.rank, topology.size, topology.generation) == (1, 2, 3)
    assert topology.me.address == "b:1"
    assert view("ab", 4).topology(1).fingerprint() != topology.fingerprint()
    first = Topology(topology.workers, 1)
    assert first.fingerprint() != topology.fingerprint()


@exhaustive
def test_whoever_leaves_last_has_heard_of_all(tmp_path, monkeypatch):
    """Each tells the next one alone, which leaves then."""
    monkeypatch.setattr(record, "_MEMORY", str(tmp_path))
    topologies = [Topology((Worker("worker", 0, f"w:{i}"),)) for i in range(1, 5)]
    nodes = {t.me.address: Node(t, Options(host="a")) for t in topologies}
    everyone = View(1, tuple(node.member for node in nodes.values()))
    for node in nodes.values():
        node._acceptor = AcceptorState(everyone)

    class Calls:
        def ask(self, address, header, seconds):
            if address not in nodes:
                raise OSError
            service = MembershipService.__new__(MembershipService)
            service._node = nodes[address]
            return service._farewell(None, header)

    for address, node in list(nodes.items()):
        del nodes[address]
        assert say_farewell(node, Calls(), node.acceptor)
