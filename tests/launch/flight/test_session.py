"""What is found in made-up logs of workers that are in exchanges of the session."""

from __future__ import annotations

import json

from tests.harness.tiers import exhaustive
from tests.launch.flight.logs import diagnosis, group, log, name, names, peer, record
from tfdist._src.cluster import Topology, Worker
from tfdist._src.cluster.session.shared_state import PendingWait
from tfdist._src.comm.flight_log import ExchangeLog
from tfdist._src.launch.flight.findings import Cycle, Mismatch, MissingWorkers
from tfdist._src.launch.flight.log import parse
from tfdist._src.launch.flight.report import sentences

pytestmark = exhaustive
EXCHANGE = {
    "number": 1,
    "kind": "exchange",
    "type": "",
    "op": "",
    "shape": None,
    "elements": 0,
    "shapes": "",
}


def session(rank, *records):
    """The session's part of a log."""
    return group(rank, records, range(3), called="session")


def exchange(number, begun, ended=None, tag="seed", **changes):
    fields = {**EXCHANGE, "name": tag, "what": f"exchange {tag!r}", **changes}
    return record(number, begun, ended) | fields


def notice(count, begun, ended=None):
    own = {"kind": "receive", "number": 1, "what": "notice 'saved'", "name": "saved", "peer": 0}
    return record(count, begun, ended) | own


def test_who_is_late_to_an_exchange(tmp_path):
    logs = [
        log(0, group(0), session=session(0, exchange(7, 29)), size=3),
        log(1, group(1), session=session(1, exchange(6, 5, 6)), size=3),
        log(2, group(2), session=session(2, exchange(7, 28)), size=3),
    ]
    (found,) = diagnosis(tmp_path, *logs).findings
    assert isinstance(found, MissingWorkers)
    assert (found.waiting, [one.worker for one in found.absent]) == ((name(0), name(2)), names(1))
    (text,) = sentences(found)
    assert text.startswith(
        f"{name(1)} has not joined exchange 'seed' (number 7 of 'session'): the others have waited "
        "for it for 32.0 s (since 22:13:48 UTC). It runs on node-1. Its last operation was "
        "exchange 'seed' (number 6 of 'session'), ended 54.0 s before its log was written."
    )
    # Without its log, nobody has heard of it: there are no statuses in a session.
    (found,) = diagnosis(tmp_path, logs[0], logs[2]).findings
    assert found.kind == "absence" and [one.worker for one in found.absent] == names(1)


def test_exchanges_with_different_tags(tmp_path):
    tags = ["shapes", "shapes", "seed"]
    logs = [
        log(r, group(r), session=session(r, exchange(7, 20 + r, tag=tag)), size=3)
        for r, tag in enumerate(tags)
    ]
    first, *_ = diagnosis(tmp_path, *logs).findings
    assert isinstance(first, Mismatch)
    assert (first.communicator, first.number, first.differs) == ("session", 7, ("the name",))
    assert [call.workers for call in first.calls] == [tuple(names(0, 1)), tuple(names(2))]
    assert "it is in exchange 'seed' (number 7 of 'session')" in sentences(first)[0]


def test_a_cycle_through_a_collective_and_an_exchange(tmp_path):
    waits = record(4, 20)
    logs = [
        log(0, group(0, [waits], range(3)), session=session(0, exchange(6, 5, 6)), size=3),
        log(1, group(1, [record(3, 2, 3)], range(3)), session=session(1, exchange(7, 21)), size=3),
        log(2, group(2, [waits], range(3)), session=session(2, exchange(6, 5, 6)), size=3),
    ]
    first, *_ = diagnosis(tmp_path, *logs).findings
    assert isinstance(first, Cycle)
    ends = {(link.worker, link.operation.communicator) for link in first.links}
    assert (name(1), "session") in ends and len(ends) == 2


def test_who_waits_for_a_notice_of_rank_0(tmp_path):
    in_exchange = session(0, exchange(6, 5, 6))
    logs = [
        log(0, group(0), session=in_exchange, size=3),
        log(1, group(1), session=session(1, exchange(6, 5, 6), notice(2, 20)), size=3),
        log(2, group(2), session=session(2, notice(2, 7, 8), exchange(6, 5, 6)), size=3),
    ]
    (found,) = diagnosis(tmp_path, *logs).findings
    assert isinstance(found, MissingWorkers) and found.is_message
    assert (found.waiting, [one.worker for one in found.absent]) == ((name(1),), names(0))
    assert sentences(found)[0].startswith(
        f"{name(1)} has waited for {name(0)} in notice 'saved' (number 2 of 'session') for 40.0 s "
        "(since 22:13:40 UTC): it has not posted it."
    )
    # Rank 0 waits for the others in an exchange meanwhile: a cycle.
    logs[0]["session"] = session(0, exchange(7, 21))
    first, *_ = diagnosis(tmp_path, *logs).findings
    assert isinstance(first, Cycle)


class Core:
    """Keeps what the native core is told of the session, and why it is to write the log."""

    def __init__(self):
        self.told, self.kinds = [], []

    def tfd_flight_set_session(self, text):
        self.told.append(json.loads(text))

    def tfd_flight_ask(self, kind, communicator, message):
        self.kinds.append((kind, communicator, message))


def test_what_the_session_tells_the_core_is_what_the_reader_takes(tmp_path):
    core, workers = Core(), tuple(Worker("worker", r, f"10.0.0.{r + 1}:8470") for r in range(3))
    recorder = ExchangeLog(core, Topology(workers, rank=1))
    notes = PendingWait(2, "saved", 19 * 10**9, is_notice=True), PendingWait(7, "seed", 20 * 10**9)
    recorder.on_exchange_begin(notes[0])
    recorder.on_exchange_end(notes[0], failed=False)
    recorder.on_stall("told by another rank")
    recorder.on_exchange_begin(notes[1])
    recorder.on_stall("told by this one")
    assert [kind for kind, *_ in core.kinds] == [b"waited", b"stall"]
    assert {communicator for _, communicator, _ in core.kinds} == {b"session"}
    own = log(1, session=core.told[-1], size=3)
    found = parse(json.dumps(own).encode()).communicators[-1]
    assert (found.name, found.ranks) == ("session", tuple(map(str, workers)))
    assert [one.what for one in found.records] == ["notice 'saved'", "exchange 'seed'"]
    assert [one.is_open for one in found.records] == [False, True]
    other = log(0, session=session(0, exchange(6, 5, 6)), size=3)
    (absence, *_) = diagnosis(tmp_path, own, other).findings
    assert (absence.kind, absence.operation.what) == ("absence", "exchange 'seed'")


def test_many_members_without_a_log(tmp_path):
    ranks = range(20)
    inside = [peer(rank, 40, 5, **{"in": "x"}) for rank in ranks[2:]]
    logs = [log(r, group(r, [record(5, 20)], ranks, peers=inside), size=20) for r in ranks[:2]]
    (found,) = diagnosis(tmp_path, *logs).findings
    head, *lines = sentences(found)
    assert found.kind == "transfer"
    assert head.endswith(
        "workers 2 to 19 have left no logs: they were killed or stopped, their hosts have died, "
        "they could not write, or their logs are not in this folder."
    )
    assert lines[0] == (
        f"{name(2)}: {name(0)} last heard from it at 22:14:00 UTC, when it was in x and had joined "
        "number 5."
    )
    assert (len(lines), lines[-1]) == (17, "and 2 more")
