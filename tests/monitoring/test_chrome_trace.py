"""A trace of two workers, event by event."""

from __future__ import annotations

from tests.harness.tiers import exhaustive
from tests.monitoring.traces import check, count_arrows, slices_of
from tfdist._src.monitoring.chrome_trace import Span, WorkerRecord, build

BASE = 10**15


def record(**values):
    nothing = {
        "number": 1, "sequence": 1, "kind": "all_reduce", "name": "gradients", "what": "w",
        "bytes": 8, "algorithm": "hierarchical", "failed": False, "peer": -1, "last": -1,
        "enqueued_ns": 0, "begun_ns": 0, "last_arrived_ns": 0, "ended_ns": 0,
        "between_begun_ns": 0, "between_ended_ns": 0, "coding_ns": 0, "arrivals_ns": [0, 0],
    }  # fmt: skip
    times = {
        key: BASE + value
        for key, value in values.items()
        if key.endswith("_ns") and key != "coding_ns"
    }
    return {**nothing, **values, **times}


def communicator(rank, *records):
    return {"name": "workers", "rank": rank, "ranks": ["a", "b"], "hosts": [0, 1],
            "records": list(records)}  # fmt: skip


def workers():
    reduced = record(
        enqueued_ns=5_000, begun_ns=10_000, last_arrived_ns=30_000, ended_ns=90_000, last=1,
        between_begun_ns=40_000, between_ended_ns=80_000, coding_ns=20_000,
    )  # fmt: skip
    reduced["arrivals_ns"] = [BASE + 10_000, BASE + 30_000]
    send = record(
        kind="send", name="m", peer=1, number=2, sequence=1, algorithm="",
        enqueued_ns=100_000, begun_ns=100_000, ended_ns=110_000,
    )  # fmt: skip
    # The other clock is a second ahead.
    ahead = 10**9
    receive = record(
        kind="receive", name="m", peer=0, number=1, sequence=1, algorithm="",
        enqueued_ns=ahead + 60_000, begun_ns=ahead + 60_000, last_arrived_ns=ahead + 105_000,
        ended_ns=ahead + 120_000, last=0,
    )  # fmt: skip
    running = record(number=3, sequence=2, enqueued_ns=190_000, begun_ns=190_000)
    return [
        WorkerRecord(
            0, "a", "one",
            spans=[Span("step", "step 7", BASE, BASE + 200_000),
                   Span("waiting", "workers", BASE + 10_000, BASE + 30_000),
                   Span("optimizer", "update", BASE + 120_000, BASE + 150_000)],
            communicators=[communicator(0, reduced, send, running)],
        ),
        WorkerRecord(
            1, "b", "two", ahead, 4_000,
            spans=[Span("step", "step 7", BASE + ahead, BASE + ahead + 200_000)],
            communicators=[communicator(1, receive)],
        ),
    ]  # fmt: skip


def test_a_trace_holds_the_events_of_both_workers():
    trace = build(workers(), {"steps": [7, 8]})
    check(trace)
    assert trace["otherData"]["clocks"]["1"] == {"offset_us": 1e6, "uncertainty_us": 4.0}
    slices = {
        (e["pid"], e["cat"], e["name"]): (e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e["ph"] == "X"
    }
    assert slices == {
        (0, "step", "step 7"): (0, 200),
        (0, "waiting", "workers"): (10, 20),
        (0, "optimizer", "update"): (120, 30),
        (0, "workers", "all_reduce gradients"): (10, 80),
        (0, "workers", "wait for b"): (10, 20),
        (0, "workers", "move"): (30, 60),
        (0, "workers", "between hosts"): (40, 40),
        (0, "workers", "within the host"): (80, 10),
        (0, "compression", "encode and decode gradients"): (30, 20),
        (0, "workers", "send m"): (100, 10),
        (1, "step", "step 7"): (0, 200),
        (1, "workers", "receive m"): (60, 60),
        (1, "workers", "wait for a"): (60, 45),
    } | {(0, "workers", "move"): (100, 10), (1, "workers", "move"): (105, 15)}
    arrows = [(e["ph"], e["pid"], e["ts"], e["id"]) for e in trace["traceEvents"]
              if e.get("bp") or e["ph"] == "s"]  # fmt: skip
    assert arrows == [("s", 0, 100, "workers a b 1"), ("f", 1, 120, "workers a b 1")]
    assert count_arrows(trace) == 1
    queued = [e["ts"] for e in trace["traceEvents"] if e["ph"] in "be"]
    assert queued == [5, 10]
    assert [e["ts"] for e in trace["traceEvents"] if e["ph"] == "i"] == [30]
    check(build([WorkerRecord(0, "a", "one")], {}))


@exhaustive
def test_who_is_waited_for_and_slices_that_overlap():
    # Rank 1 comes last; rank 2, on another host, notices that of its neighbour, rank 0.
    begun = (10_000, 50_000, 20_000, 30_000)
    noticed = (2, 2, 0, 1)  # It waited itself, for what rank 2 had to do first.
    names, hosts = ["a", "b", "c", "d"], [0, 0, 1, 1]

    def waited(uncertainty):
        made = []
        for rank, (begin, last) in enumerate(zip(begun, noticed, strict=True)):
            arrived = {} if last < 0 else {"last_arrived_ns": 60_000}
            one = record(enqueued_ns=begin, begun_ns=begin, ended_ns=90_000, last=last, **arrived)
            part = communicator(rank, one) | {"ranks": names, "hosts": hosts}
            # Of two replicas.
            spans = [Span("optimizer", "update", BASE + t, BASE + t + 20) for t in (100, 110, 120)]
            doubt = uncertainty if hosts[rank] else 0
            made.append(WorkerRecord(rank, names[rank], str(hosts[rank]), 0, doubt, spans, [part]))
        trace = build(made, {})
        check(trace)
        assert [len(slices_of(trace, 0, lane)) for lane in ("optimizer", "optimizer 2")] == [2, 1]
        waits = [e for e in trace["traceEvents"] if e["name"].startswith("wait for")]
        return {e["pid"]: e["name"].removeprefix("wait for ") for e in waits}

    assert waited(1_000) == {0: "b", 1: "c", 2: "b", 3: "b"}
    # Ranks 0 and 1 have one clock, however that compares with that of rank 2.
    for doubt in (None, 40_000):
        assert waited(doubt) == {0: "c", 1: "c", 2: "b", 3: "b"}
