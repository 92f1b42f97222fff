"""For whom members and newcomers wait, and for how long; with threads as members."""

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive
from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist._src.cluster.membership import membership, record
from tfdist._src.cluster.membership.calls import Call, Calls
from tfdist._src.cluster.membership.joining import Joiner
from tfdist._src.cluster.membership.membership import WHAT, Membership, listen, make_terms
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.membership.proposer import FormationPolicy
from tfdist._src.cluster.membership.record import _started
from tfdist._src.cluster.membership.regrouping import Regrouping
from tfdist._src.cluster.membership.view import (
    Member,
    Patience,
    ProcessIdentity,
    View,
    encode_member,
)
from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.rendezvous.shared_listener import SharedListener
from tfdist._src.options import Options
from tfdist.errors import RendezvousError

OPTIONS = Options()
NEVER = Patience(refused=FAR, silent=FAR)


class Part:
    """One member of a group, which regroups in a thread."""

    def __init__(self, topology, process=None):
        self.topology = topology
        self.node = Node(topology, OPTIONS)
        if process is not None:
            place = replace(self.node.member.place, pid=process.pid, started=_started(process.pid))
            self.node.member = replace(self.node.member, place=place)
        self.listener = SharedListener(topology, OPTIONS, WHAT, print)
        listen(self.listener, self.node, topology)
        self.calls = Calls(topology, OPTIONS)
        self.dialed = 0
        self.outcome = None

    def dial(self, address, deadline):
        self.dialed += 1
        return Calls.dial(self.calls, address, deadline)

    def regroup(self, terms, base=0):
        self.calls.dial = self.dial
        self.node.regrouping = True
        self.thread = threading.Thread(target=self._regroup, args=[terms, base], daemon=True)
        self.thread.start()

    def _regroup(self, terms, base):
        regrouping = Regrouping(self.node, self.calls, terms, False, "", print)
        try:
            view, sockets = regrouping.run(base)
        except Exception as error:
            self.outcome = error
            return
        self.outcome = len(view.members)
        for sock in sockets.values():
            sock.close()

    def ended(self):
        self.thread.join()
        return self.outcome


@pytest.fixture
def parts(addresses):
    """The members of a group; rank 0 runs in another process, if one is given."""
    made = []

    def make(process=None, count=2):
        workers = tuple(Worker("worker", n, at) for n, at in enumerate(addresses(count)))
        for rank in range(count):
            topology = Topology(workers, rank, "worker", rank)
            made.append(Part(topology, process if rank == 0 else None))
        view = View(0, tuple(part.node.member for part in made))
        for part in made:
            part.node.learn(view)
        return made

    yield make
    for part in made:
        part.listener.pause()
        part.node.close(keep_record=False)


def terms(timeout, patience, **more):
    return FormationPolicy(1, None, True, timeout, FAR, patience, hasty=0.2, **more)


def test_a_member_that_is_seen_alive_may_refuse_connections_for_long(parts, until):
    first, second = parts()
    first.listener.resume()
    first.regroup(terms(FAR, Patience(refused=0.0, silent=FAR)))
    until(lambda: first.dialed > 5 or first.outcome)
    second.listener.resume()
    second.regroup(terms(FAR, NEVER))
    assert first.ended() == second.ended() == 2


def test_a_member_whose_connection_has_broken_is_awaited_while_it_is_seen_alive(parts):
    first, second = parts()
    first.listener.resume()
    first.regroup(terms(FAR, NEVER, suspects=frozenset({second.node.me})))
    time.sleep(0.6)
    assert first.outcome is None
    second.listener.resume()
    second.regroup(terms(FAR, NEVER))
    assert first.ended() == second.ended() == 2


@pytest.mark.parametrize("why", ["silent", "not seen"])
def test_a_member_is_not_awaited_for_long_if_it_was_silent_or_is_not_seen(parts, why):
    first, second = parts()
    place = replace(second.node.member.place, machine="another")
    if why == "not seen":
        unseen = replace(second.node.member, place=place)
        first.node.learn(View(1, (first.node.member, unseen)))
    suspects = frozenset({second.node.me})
    silent = suspects if why == "silent" else frozenset()
    first.listener.resume()
    asked = terms(FAR, NEVER, suspects=suspects, silent=silent)
    first.regroup(asked, base=first.node.view.generation)
    assert first.ended() == 1


def test_those_that_are_ready_wait_for_a_leader_that_is_busy(parts):
    first, second = parts()
    for part in (first, second):
        part.listener.resume()
    second.regroup(terms(0.2, NEVER))
    time.sleep(1.0)
    assert second.outcome is None
    first.regroup(terms(FAR, NEVER))
    assert first.ended() == second.ended() == 2


@exhaustive
def test_those_that_are_ready_wait_for_another_one_that_is_busy(parts, until):
    first, second = parts()
    for part in (first, second):
        part.listener.resume()
    first.regroup(terms(4.0, NEVER))
    until(lambda: first.node.view.generation == 1)  # to which the other one has agreed
    time.sleep(5.0)
    assert first.outcome is None
    second.regroup(terms(FAR, NEVER))
    assert first.ended() == second.ended() == 2


def test_those_that_are_ready_do_not_wait_long_for_one_that_has_failed(parts):
    first, second = parts()
    first.listener.resume()
    first.node.failed = True
    second.regroup(terms(0.2, NEVER))
    error = str(second.ended())
    assert "1 of 2 workers of the last group are present, which is no majority" in error
    assert "(has not arrived within 0.2 s, TFDIST_START_TIMEOUT)" in error


def test_a_busy_one_is_not_waited_for_without_end(parts):
    first, second = parts()
    first.listener.resume()
    second.regroup(brief(0.5))
    error = str(second.ended())
    assert "1 of 2 workers of the last group are present, which is no majority" in error
    assert f"missing: {first.node.member} (has not arrived within 0.5 s" in error
    assert "TFDIST_COLLECTIVE_TIMEOUT" in error


def brief(seconds):
    """Waits for so long for a member that is busy."""
    return replace(terms(FAR, NEVER), busy=seconds)


@pytest.mark.parametrize("when", ["decides", "enters"])
@pytest.mark.parametrize("absent", [0, 2])
def test_a_majority_leaves_out_one_that_is_busy_for_too_long(parts, capsys, absent, when):
    group = parts(count=3)
    if when == "enters":
        view = View(1, tuple(part.node.member for part in group))
    for part in group:
        part.listener.resume()
        if when == "enters":
            part.node.learn(view)
    late = group.pop(absent)
    for part in group:
        part.regroup(brief(0.4))
    assert [part.ended() for part in group] == [2, 2]
    said = capsys.readouterr().out
    assert f"{late.node.member} is lost (has not arrived within 0.4 s" in said
    generation = group[0].node.view.generation
    late.regroup(brief(0.4))
    error = str(late.ended())
    assert f"was given up: generation {generation} of the group was formed without it" in error


def test_a_majority_leaves_out_one_that_has_failed(parts):
    group = parts(count=3)
    for part in group:
        part.listener.resume()
    group[0].node.failed = True
    for part in group[1:]:
        part.regroup(terms(0.3, NEVER))
    assert [part.ended() for part in group[1:]] == [2, 2]


@pytest.mark.parametrize("when", ["decides", pytest.param("enters", marks=exhaustive)])
def test_whoever_was_early_waits_for_the_one_that_leads_then(parts, when):
    group = parts(count=3)
    if when == "enters":
        view = View(1, tuple(part.node.member for part in group))
    for part in group:
        part.listener.resume()
        if when == "enters":
            part.node.learn(view)
    early = replace(brief(1.5), timeout=0.2)
    group[2].regroup(early)
    time.sleep(0.5)
    group[1].regroup(early)
    assert [part.ended() for part in group[1:]] == [2, 2]


def test_whoever_arrives_does_not_leave_out_one_that_waits_for_a_third(parts):
    group = parts(count=4)
    view = View(1, tuple(part.node.member for part in group))
    for part in group:
        part.listener.resume()
        part.node.learn(view)
    group[1].regroup(brief(1.5))
    time.sleep(0.5)
    for part in (group[0], group[2]):
        part.regroup(brief(1.5))
    assert [part.ended() for part in group[:3]] == [3, 3, 3]


@exhaustive
def test_the_time_for_which_one_was_busy_that_is_lost_then_does_not_count(parts, child):
    first, second = parts(child)
    for part in (first, second):
        part.listener.resume()
    limit = 2 * membership.REFUSED_SECONDS
    second.regroup(terms(3.0, Patience(refused=limit, silent=FAR)))
    time.sleep(4.0)
    child.kill()
    child.wait()
    first.listener.pause()
    assert second.ended() == 1


@pytest.mark.parametrize("heard", [False, True])
def test_a_last_word_that_nobody_has_heard_is_kept(sessions, in_parallel, monkeypatch, heard):
    monkeypatch.setattr(membership, "say_farewell", lambda *_: heard)
    group = sessions(2)
    members = in_parallel(lambda session: Membership(session, OPTIONS), group)
    group[0].fail("a worker is lost")
    for one in members:
        path = Path(one.view.members[one.session.rank].place.record)
        one.close()
        assert path.exists() == (not heard)
        record.remove(str(path))


def test_newcomers_that_have_gone_away_are_forgotten(parts, until):
    first, second = parts()
    first.node.learn(View(1, (first.node.member,)))
    first.listener.resume()
    address = first.topology.me.address
    request = {"kind": "join", "member": encode_member(second.node.member)}
    for _ in range(2):  # it may come again
        call = Call(second.calls, address, request)
        threading.Thread(target=waited, args=[call]).start()
        until(lambda: first.node.connected == [second.node.member])
        call.close()
        until(lambda: not first.node.connected)


def waited(call):
    with contextlib.suppress(OSError, WireError):
        call.run(lambda frame: False, FAR)


def test_limits_follow_the_options():
    short = make_terms(Options(heartbeat_timeout=2.0, start_timeout=5.0))
    assert short.patience == Patience(2.0, 2.0)
    assert (short.timeout, short.busy) == (5.0, Options().collective_timeout)
    assert make_terms(Options(start_timeout=900.0)).busy == 900.0
    assert make_terms(Options()).patience == Patience(membership.REFUSED_SECONDS, 60.0)


@pytest.fixture
def joiner(addresses):
    """A newcomer that has found a member, which runs somewhere."""
    made = []

    def make(place, **options):
        own, other = addresses(2)
        workers = (Worker("worker", 0, own), Worker("worker", 1, other))
        topology = Topology(workers, 0, "worker", 0)
        settings = Options(**options)
        member = Member(workers[1], "0" * 16, place)
        calls = Calls(topology, settings)
        made.append(Joiner(topology, settings, calls, [member], print))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_newcomer_does_not_wait_for_a_job_that_is_gone(joiner, child, monkeypatch):
    monkeypatch.setattr(membership, "REFUSED_SECONDS", 0.2)
    mine = Node(Topology((Worker("worker", 0, "w:1"),)), OPTIONS).member.place
    place = replace(mine, pid=child.pid, started=_started(child.pid))
    # One that is alive may be connecting to others.
    with pytest.raises(RendezvousError, match="has not been admitted"):
        joiner(place).wait(timeout=0.8)
    child.kill()
    child.wait()
    with pytest.raises(RendezvousError, match="cannot join the running job, which has ended"):
        joiner(place).wait(timeout=FAR)


@exhaustive
def test_a_newcomer_waits_longer_for_members_that_may_be_cut_off(joiner, monkeypatch):
    monkeypatch.setattr(membership, "REFUSED_SECONDS", 0.2)
    unknown = ProcessIdentity("another machine", 1, 1)
    with pytest.raises(RendezvousError, match="cannot join the running job, which has ended"):
        joiner(unknown, heartbeat_timeout=0.5).wait(timeout=FAR)
    with pytest.raises(RendezvousError, match="has not been admitted"):
        joiner(unknown).wait(timeout=1.5)


@exhaustive
def test_those_that_are_restarted_meet_when_a_job_has_ended(group, start):
    cluster, workers = group(2, {0: {"MAX_WORKERS": "1"}}, TFDIST_HEARTBEAT_TIMEOUT="3600")
    workers[1].kill()
    workers[0].until("members 0.")
    newcomer = start(cluster, 1)
    newcomer.until("waits")
    workers[0].kill()
    restarted = start(cluster, 0)
    assert "cannot join the running job, which has ended" in newcomer.rest()
    again = start(cluster, 1)
    for worker in (restarted, again):
        worker.until("met")
