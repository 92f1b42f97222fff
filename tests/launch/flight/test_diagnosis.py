"""What is found in made-up logs."""

from __future__ import annotations

from tests.launch.flight.logs import STACK, diagnosis, group, log, name, peer, record
from tfdist._src.launch.flight.diagnosis import Edge, find_cycles
from tfdist._src.launch.flight.findings import Cycle, Link, Operation
from tfdist._src.launch.flight.report import sentences

FIRST = [record(n, n, n + 0.5) for n in range(1, 17)]


def found(folder, *logs):
    """The findings' kinds and texts."""
    findings = diagnosis(folder, *logs).findings
    return [(finding.kind, " ".join(sentences(finding))) for finding in findings]


def test_mismatches_are_named_by_what_differs(tmp_path):
    changes = {
        "the kind": {"kind": "all_gather"},
        "the name": {"name": "w"},
        "the type": {"type": "int32"},
        "the shapes": {"shapes": "77"},
        "the number of tensors": {"tensors": 2},
        "the number of elements": {"elements": 6},
        "the reduction": {"op": "max"},
        "the root": {"root": 3},
        "the compression": {"codec": "5"},
        "the algorithm (TFDIST_ALGORITHM)": {"forced_algorithm": "ring"},
        "the number of failed steps": {"failures": 1},
    }
    for differs, change in changes.items():
        # Two numbers differ: the first one counts. Rank 3 has lost its first records, and its log
        # of this communicator ends before the others'.
        common = [*FIRST, record(17, 20), record(18, 30)]
        other = [*FIRST, record(17, 20, **change), record(18, 30, name="later")]
        logs = [
            log(0, group(0, common)),
            log(1, group(1, common)),
            log(2, group(2, other)),
            log(3, group(3, common[10:17])),
        ]
        ((first, text),) = found(tmp_path, *logs)
        assert first == "mismatch"
        assert text.startswith(f"{name(2)} called another collective than the others: it is in ")
        assert "(number 17 of 'workers'), where workers 0, 1 and 3 are in all_reduce '0'" in text
        assert f"They differ in {differs}. Run one program" in text
        # Half of them: nobody is the odd one out. The subgroup has its own numbers.
        pair = [
            log(r, group(r % 2, part, (2, 3), called="pair"))
            for r, part in ((2, common), (3, other))
        ]
        ((first, text), *_) = found(tmp_path, *pair)
        assert text.startswith("The workers called different collectives (number 17 of 'pair'): ")
        assert f"{name(2)} is in all_reduce '0' float32[5] sum and {name(3)} is in " in text
    # An earlier run's log, with the same numbers.
    old = log(
        1, group(1, [record(n, n - 200, n - 199, name="old") for n in (1, 2)], (0, 1)), written=-100
    )
    assert found(tmp_path, log(0, group(0, FIRST, (0, 1)), size=4), old) == []
    # The same number in other groups, and messages, are not compared.
    for one in (group(1, FIRST, (0, 2)), group(1, FIRST, called="b")):
        one["records"] = [record(1, 1, 2, name="other")]
        assert found(tmp_path, log(0, group(0, FIRST)), log(2, one)) == []
    messages = [record(1, 1, 2, kind="send", peer=1 - r, name=str(r)) for r in range(2)]
    assert found(tmp_path, *[log(r, group(r, [messages[r]])) for r in range(2)]) == []


WAITING = [*FIRST, record(17, 28.8)]
GAVE_UP = [*FIRST, record(17, 28.8, 50.0, failed=True)]
OVERDUE = {"message": "It has waited.", "event": "other", "worker": ""}


def test_absent_ranks_are_named_with_what_they_did_last(tmp_path):
    others = [log(r, group(r, WAITING)) for r in range(3)]
    gave_up = [
        log(r, group(r, GAVE_UP, aborted={**OVERDUE, "detected": {"operation": "x", "rank": r}}))
        for r in range(3)
    ]
    stalled = log(3, group(3, FIRST), stacks=STACK)
    # Case -> the logs, the kinds of the findings and parts of the first text.
    cases = {
        "its log is there": (
            [*others, stalled],
            ["absence"],
            f"{name(3)} has not joined all_reduce '0' float32[5] sum (number 17 of 'workers'): the "
            f"others have waited for it for 31.2 s (since 22:13:48 UTC). It runs on node-3. Its "
            f"last operation was all_reduce '0' float32[5] sum (number 16 of 'workers'), ended "
            f"43.5 s before its log was written. Its Python main thread was in load "
            f"(/app/data.py:12), called by <module> (/app/train.py:40).",
        ),
        "it has begun none": ([*others, log(3, group(3))], ["absence"], "has not joined"),
        "no log": (others, ["absence"], "It has left no log, and no other log mentions it."),
        "no log, but heard of": (
            [
                log(0, group(0, WAITING, peers=[peer(3, 20, 16)])),
                log(
                    1,
                    group(
                        1,
                        WAITING,
                        peers=[peer(3, 27, 16, lost=True, **{"in": "x"})],
                        hosts=[0, 1, 2, 1],
                    ),
                ),
            ],
            ["absence"],
            f"{name(3)}: It runs on node-1. It counts as lost. It has left no log: it was killed "
            f"or stopped, its host has died, it could not write, or its log is not in this folder; "
            f"{name(1)} last heard from it at 22:13:47 UTC, when it was in x",
        ),
        "no log, and it has left": (
            [log(0, group(0, WAITING, peers=[peer(3, 27, 16, left=True)]))],
            ["absence"],
            "had left the group",
        ),
        "no log, but it has joined": (
            [log(r, group(r, WAITING, peers=[peer(3, 40, 17)])) for r in range(3)],
            ["transfer"],
            f"slow or stuck. {name(3)}: It has left no log: it was killed or stopped, its host has "
            f"died, it could not write, or its log is not in this folder; {name(0)} last heard "
            f"from it at 22:14:00 UTC, when",
        ),
        "its log is older than the wait": (
            [*others, log(3, group(3, FIRST), written=28)],
            ["unclear"],
            f"It is unknown whether {name(3)} joined it",
        ),
        "older, but heard of later": (
            [
                log(0, group(0, WAITING, peers=[peer(3, 48.8, 16)])),
                *others[1:],
                log(3, group(3, FIRST), written=28),
            ],
            ["absence"],
            "have waited for it for 20.0 s",
        ),
        "older, and joined since": (
            [
                log(0, group(0, WAITING, peers=[peer(3, 40, 17)])),
                *others[1:],
                log(3, group(3, FIRST), written=28),
            ],
            ["transfer"],
            "All have joined",
        ),
        "one is older, one is not": (
            [*others[:2], log(2, group(2, FIRST), written=28), stalled],
            ["absence", "unclear"],
            "'workers'): workers 0 and 1 have waited for it for 31.2 s",
        ),
        "written during the wait": (
            [*others, log(3, group(3, FIRST), written=38.8)],
            ["absence"],
            "have waited for it for 10.0 s",
        ),
        "its log does not show the communicator": (
            [*others, log(3, group(0, FIRST, (3,), called="own"))],
            ["absence"],
            "Its log does not show the communicator",
        ),
        "nor did it when it was written before": (
            [*others, log(3, written=10)],
            ["unclear"],
            "the log does not cover that time",
        ),
        "collectives lost behind messages": (
            [*others, log(3, group(3, [record(9, 1, 2, kind="send", peer=0, number=2000)]))],
            ["unclear"],
            "It is unknown whether",
        ),
        "short": (
            [*[log(r, group(r, WAITING), written=29.7) for r in range(3)], stalled],
            [],
            "",
        ),
        "short, but failed": (
            [
                *[
                    log(r, group(r, [*FIRST, record(17, 28.8, 29.1, failed=True)]))
                    for r in range(3)
                ],
                stalled,
            ],
            ["absence"],
            "have waited for it for 0.300 s",
        ),
        "given up": ([*gave_up, stalled], ["failure", "absence"], "It has waited. This ended 'w"),
        "joined after that": (
            [*gave_up, log(3, group(3, [*FIRST, record(17, 53, 53.1, failed=True)]))],
            ["failure", "absence"],
            f"{name(3)} joined all_reduce '0' float32[5] sum (number 17 of 'workers') only after "
            f"the others had given up: they had waited for 21.2 s",
        ),
        "joined just before": (
            [*gave_up, log(3, group(3, [*FIRST, record(17, 49, 50.1, failed=True)]))],
            ["failure"],
            "",
        ),
        "two": (
            others[:2],
            ["absence"],
            "workers 2 and 3 have not joined all_reduce '0' float32[5] sum (number 17 of 'workers')"
            ": the others have waited for them for 31.2 s",
        ),
        "two, of which one waits for the other": (
            [
                *others[:2],
                log(2, group(2, FIRST), group(0, [record(1, 9)], (2, 3), called="b")),
                log(3, group(3, FIRST), group(1, [], (2, 3), called="b")),
            ],
            ["absence", "absence"],
            f"(number 1 of 'b'): {name(2)} has waited for it for 51.0 s",
        ),
        "devices of one worker": (
            [
                log(
                    0,
                    group(0, [record(1, 1)], (0, 0), called="devices"),
                    group(1, [], (0, 0), called="devices"),
                )
            ],
            ["absence"],
            f"{name(0)} has not joined",
        ),
        "a broadcast's root": (
            [log(1, group(1, [record(5, 10, kind="broadcast", root=2)]))],
            ["absence"],
            f"{name(2)} has not joined broadcast '0' float32[5] (number 5 of 'workers'): {name(1)} "
            f"has waited for it for 50.0 s",
        ),
        "several communicators": (
            [
                log(0, group(0, FIRST), group(0, [record(2, 5)], (0, 2), called="b")),
                log(2, group(2, FIRST), group(1, [], (0, 2), called="b")),
            ],
            ["absence"],
            f"{name(2)} has not joined all_reduce '0' float32[5] sum (number 2 of 'b')",
        ),
        "one rank": ([log(0, group(0, [record(1, 1)], (0,)), size=1)], ["transfer"], ""),
        "no communicators": ([log(0), log(1)], [], ""),
        "only ended ones": ([log(r, group(r, FIRST)) for r in range(4)], [], ""),
    }
    for case, (logs, kinds, text) in cases.items():
        findings = found(tmp_path, *logs)
        assert [kind for kind, _ in findings] == kinds, case
        if case == "joined after that":
            findings = findings[1:]
        if case == "two, of which one waits for the other":
            # The one that waits for nobody is first.
            assert findings[1][1].index(f"{name(3)}: ") < findings[1][1].index(f"{name(2)}: ")
        assert not text or text in findings[0][1], (case, findings)


def message(kind, other, begun=10.0, ended=None, sequence=1, **changes):
    fields = {"number": 1, "peer": other, **changes}
    return record(sequence, begun, ended, kind=kind, **fields)


def pipe(rank, *records, **changes):
    return log(rank, group(rank, records, called="pipe"), **changes)


def test_messages_and_cycles(tmp_path):
    sent = message("send", 1, 2, 3)
    cases = {
        "no matching send": (
            [pipe(0, sent), pipe(1, message("receive", 0, sequence=2))],
            ["absence"],
            f"{name(1)} has waited for {name(0)} in receive '0' float32[5] (number 2 of 'pipe') "
            f"for 50.0 s (since 22:13:30 UTC): its log shows no matching send.",
        ),
        "no matching receive": (
            [pipe(0, message("send", 1)), pipe(1)],
            ["absence"],
            "no matching receive",
        ),
        "a matching send": ([pipe(0, sent), pipe(1, message("receive", 0))], ["transfer"], ""),
        "a send to another one": (
            [pipe(0, message("send", 2, 2, 3)), pipe(1, message("receive", 0))],
            ["absence"],
            "no matching send",
        ),
        "no log": ([pipe(1, message("receive", 0))], ["absence"], "It has left no log"),
        "a log from before": (
            [pipe(0, written=9), pipe(1, message("receive", 0))],
            ["unclear"],
            "",
        ),
        "a log without the communicator": (
            [log(0), pipe(1, message("receive", 0))],
            ["absence"],
            "does not show the communicator",
        ),
        "such a log from before": (
            [log(0, written=9), pipe(1, message("receive", 0))],
            ["unclear"],
            "",
        ),
        "lost records": (
            [pipe(0, message("send", 2, 2, 3, number=9)), pipe(1, message("receive", 0))],
            ["unclear"],
            "",
        ),
        "a chain": (
            [pipe(0), pipe(1, message("receive", 0, 12)), pipe(2, message("receive", 1, 10))],
            ["absence", "absence"],
            f"{name(1)} has waited for {name(0)} in receive",
        ),
        "a cycle": (
            [pipe(r, message("receive", (r + 1) % 3)) for r in range(3)],
            ["cycle", "absence", "absence", "absence"],
            "workers 0 to 2 wait for one another in a cycle, and none can proceed: "
            f"{name(0)} waits for {name(1)} in receive '0' float32[5] (number 1 of 'pipe').",
        ),
        "a cycle through a collective": (
            [
                log(0, group(0, [record(3, 10, number=1)], (0, 1), called="pipe")),
                log(1, group(1, [message("receive", 0)], (0, 1), called="pipe")),
            ],
            ["cycle", "absence", "absence"],
            f"{name(0)} waits for {name(1)} in all_reduce '0' float32[5] sum (number 3 of 'pipe')",
        ),
        "a cycle through two communicators": (
            [
                log(
                    0,
                    group(0, [record(1, 5)], (0, 1), called="a"),
                    group(0, [], (0, 1), called="b"),
                ),
                log(
                    1,
                    group(1, [], (0, 1), called="a"),
                    group(1, [record(1, 6)], (0, 1), called="b"),
                ),
            ],
            ["cycle", "absence", "absence"],
            "(number 1 of 'b')",
        ),
    }
    for case, (logs, kinds, text) in cases.items():
        findings = found(tmp_path, *logs)
        assert [kind for kind, _ in findings] == kinds, (case, findings)
        assert text in findings[0][1], (case, findings)
    # Workers that lead to a cycle are not in it; waits of different times are none.
    edge = {
        (a, b): Link(name(a), Operation("x", "pipe", 1), name(b))
        for a in range(5)
        for b in range(5)
    }
    ways = [Edge(edge[way], 0, 5) for way in [(4, 1), (1, 2), (2, 0), (2, 3), (3, 1)]]
    assert find_cycles(ways) == [Cycle((edge[1, 2], edge[2, 3], edge[3, 1]))]
    assert find_cycles(ways[:4]) == []
    later = [Edge(edge[way], 0, 5) for way in [(0, 1), (1, 2), (2, 1)]]
    assert find_cycles(later) == [Cycle((edge[1, 2], edge[2, 1]))]
    assert find_cycles([*ways[:4], Edge(edge[3, 1], 5, 9)]) == []
