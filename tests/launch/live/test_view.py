"""What the live view makes of the answers of rank 0."""

from __future__ import annotations

import json
import re

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.cluster.observation import RankState
from tfdist._src.launch.live import headline, live_json, live_text, ranks


def report(time=0.0, operation=None, number=17, **values):
    """A rank's report; `operation` is seconds, and for whom it waits."""
    operations = []
    if operation is not None:
        seconds, waits_for = operation
        operations.append(
            {
                "communicator": "workers",
                "what": "all_reduce 'g' float32[3] sum",
                "number": number,
                "seconds": seconds,
                "waits_for": waits_for,
                "missing": len(waits_for),
            }
        )
    counts = dict.fromkeys(
        ("joined", "steps", "rows", "input", "workers", "network", "collectives"), 0
    )
    sizes = {"shared_bytes": 0, "sent_bytes": 0, "resident_bytes": 1 << 29, "queued": 0}
    place = {"host": "h", "pid": 7, "idle": None if operations else 0.01, "main": "load (t.py:3)"}
    place["input_wait"], place["links"], place["leader"] = None, [], None
    return {**counts, **sizes, **place, "time": time, "operations": operations, **values}


def exchange(seconds, number=17):
    """A report from an exchange, which does not tell for whom the rank waits."""
    found = report(operation=(seconds, []), number=number)
    found["operations"][0].update(communicator="session", what="exchange 'seed'", waits_for=None)
    return found


def seen(reports, silence=4.0):
    """The answer; a text instead of a report is why that rank is gone."""
    return [
        RankState(n, f"worker {n} (a:{n})", None, one, None)
        if isinstance(one, str)
        else RankState(n, f"worker {n} (a:{n})", silence, "", one)
        for n, one in enumerate(reports)
    ]


def view(*after, before=None):
    return ranks(seen(before or [report(time=-2.0) for _ in after]), seen(after))


STEPS = {"steps": 62, "rows": 620}
# In two seconds. Each: rank, acknowledged bytes, busy microseconds, pending bytes, milliseconds; in
# newer versions also messages, and the microseconds that these took.
BUSY = {**STEPS, "network": 1.0}
OLD = report(time=-2.0, links=[(rank, 1_000_000, 10_000, 0, 0) for rank in range(3)])
SLOW_LINKS = [
    report(**BUSY, links=[(1, 9_000_000, 20_000, 0, 0), (2, 9_000_000, 90_000, 0, 0)]),
    report(**BUSY, links=[(0, 9_000_000, 20_000, 0, 0), (2, 9_000_000, 90_000, 0, 0)]),
    report(**BUSY, links=[(0, 9_000_000, 1_010_000, 0, 0), (1, 9_000_000, 1_010_000, 0, 0)]),
]
SLOWNESS = {
    "All 3 ranks are running: 31 steps/s, 930 rows/s. worker 2 (a:2) on h keeps the others "
    "waiting: its connections to other hosts carry 8 MB/s while they send, where the median of the "
    "others is 800 MB/s. Look at the network of its host.": SLOW_LINKS,
    # Two hosts of two ranks, of which only the first ones send gradients.
    "All 4 ranks are running: 31 steps/s, 1,240 rows/s. The connections from worker 0 (a:0) on h "
    "to worker 2 (a:2) on h keep the others waiting: they carry 8 MB/s while they send, where the "
    "median of the others is 800 MB/s. Look at the network between them.": [
        report(**BUSY, leader=0, links=[(2, 9_000_000, 1_010_000, 0, 0)]),
        report(**BUSY, leader=0, links=[(2, 1_090_000, 1_010_000, 0, 0)]),
        report(**BUSY, leader=2, links=[(0, 9_000_000, 20_000, 0, 0)]),
        report(**BUSY, leader=2, links=[(0, 1_090_000, 1_010_000, 0, 0)]),
    ],
    # Both directions carry equally little; reports also say how long 100 messages took.
    "All 2 ranks are running: 31 steps/s, 620 rows/s. The connections from worker 0 (a:0) on h to "
    "worker 1 (a:1) on h keep the others waiting: data queues there, and small messages take "
    "20.0 ms, but 1.0 ms the other way. Look at the network between them.": [
        report(**BUSY, links=[(1, 9_000_000, 1_010_000, 0, 0, 100, 100_000)]),
        report(**BUSY, links=[(0, 9_000_000, 1_010_000, 0, 0, 100, 2_000_000)]),
    ],
    "All 2 ranks are running: 31 steps/s, 620 rows/s. worker 1 (a:1) on h keeps the others "
    "waiting: its input takes 29.0 ms of a step, where the median of the others is 0.0 ms. Look at "
    "how it reads and prepares its data: its disk, and `prefetch`, `cache` and "
    "`num_parallel_calls` of the dataset.": [
        report(**STEPS, workers=1.8),
        report(**STEPS, input=1.8),
    ],
    # A group has been closed; and rates of small messages vary.
    "All 2 ranks are running: 31 steps/s, 620 rows/s. Each preprocesses 40% to 50% of the rows.": [
        report(**STEPS, divided_rows=620, preprocessed_rows=248),
        report(**STEPS, divided_rows=620, preprocessed_rows=310),
    ],
    "All 2 ranks are running: 31 steps/s, 620 rows/s.": [
        report(**BUSY, links=[(1, 900_000, 60_000, 0, 0)]),
        report(**BUSY, links=[(0, 9_000_000, 60_000, 0, 0)]),
    ],
    "All 3 ranks are running: 31 steps/s, 930 rows/s.": [
        report(**BUSY, links=[(1, 9_000_000, 30_000, 0, 0)]),
        report(**BUSY, links=[(0, 9_000_000, 20_000, 0, 0)]),
        report(**BUSY, links=[(0, 9_000_000, 20_000, 0, 0)]),
    ],
    # Too few steps to tell.
    "All 2 ranks are running: 1.5 steps/s, 0 rows/s.": [
        report(steps=3, workers=1.8),
        report(steps=3, input=1.8),
    ],
    "2 of 2 ranks wait in all_reduce 'g' float32[3] sum (number 17 of 'workers') for 5.0 s: all "
    "have joined it, and its data transfer is slow or stuck. Data is on its way from worker 1 "
    "(a:1) to worker 0 (a:0): 2 MB, at 0.5 MB/s. Look at the network between them.": [
        report(operation=(5.0, []), links=[(1, 9_000_000, 20_000, 3_000, 9)]),
        report(operation=(5.0, []), links=[(0, 1_500_000, 1_010_000, 2_000_000, 90)]),
    ],
    "1 of 2 ranks waits in all_reduce 'g' float32[3] sum (number 17 of 'workers') for 5.0 s for "
    "worker 1 (a:1), which does not respond, last heard from 4.0 s ago. Data is on its way from "
    "worker 0 (a:0) to worker 1 (a:1): 2 MB, and nothing has arrived for 4.5 s. Look at the "
    "network between them.": [
        report(operation=(5.0, [1]), links=[(1, 1_000_000, 2_010_000, 2_000_000, 4_500)]),
        None,
    ],
    # A moment's data.
    "1 of 2 ranks waits in all_reduce 'g' float32[3] sum (number 17 of 'workers') for 1.2 s for "
    "worker 1 (a:1) on h, which is in no collective for 0.010 s.": [
        report(operation=(1.2, [1]), links=[(1, 9_000_000, 20_000, 3_000, 9)]),
        report(),
    ],
}
HEADLINES = {
    "All 2 ranks are running: 31 steps/s, 620 rows/s.": [report(**STEPS), report(**STEPS)],
    "2 of 3 ranks wait in all_reduce 'g' float32[3] sum (number 17 of 'workers') for 5.0 s for "
    "worker 2 (a:2), which does not respond, last heard from 4.0 s ago.": [
        report(operation=(5.0, [])),  # which rank 2 has joined, before it was stopped
        report(operation=(4.9, [])),
        None,
    ],
    "2 of 3 ranks wait in all_reduce 'g' float32[3] sum (number 18 of 'workers') for 5.0 s for "
    "worker 2 (a:2), which does not respond, last heard from 4.0 s ago.": [
        report(operation=(5.0, [1]), number=18),  # for a rank that waits in the one before
        report(operation=(4.9, [])),
        None,
    ],
    "2 of 3 ranks wait in exchange 'seed' (number 17 of 'session') for 5.0 s for worker 2 (a:2), "
    "which does not respond, last heard from 4.0 s ago.": [exchange(5.0), exchange(4.0), None],
    "1 of 2 ranks waits in exchange 'seed' (number 17 of 'session') for 5.0 s for worker 0 (a:0) "
    "on h, which is in no collective for 0.010 s.": [report(), exchange(5.0)],
    "2 of 2 ranks wait in exchange 'seed' (number 17 of 'session') for 5.0 s: they wait for one "
    "another.": [exchange(5.0), report(operation=(4.0, [0]))],
    "1 of 2 ranks is running: 31 steps/s, 310 rows/s. worker 1 (a:1) does not respond.": [
        report(**STEPS),
        None,
    ],
    "All 2 ranks are running: 5 collectives/s, and no step has begun.": [
        report(collectives=10),
        report(collectives=9),
    ],
    "No rank is in a collective, and none has ended in 2.0 s; their main threads are in load (t.p"
    "y:3).": [report(idle=3.0), report(idle=2.0)],
    "2 of 3 ranks wait in all_reduce 'g' float32[3] sum (number 17 of 'workers') for 12.3 s for "
    "worker 1 (a:1) on h, which is in no collective for 12.5 s: its main thread is in load (t.py:"
    "3).": [report(operation=(12.3, [1])), report(idle=12.5), report(operation=(12.0, [1]))],
    "1 of 2 ranks waits in all_reduce 'g' float32[3] sum (number 17 of 'workers') for 5.0 s for "
    "worker 1 (a:1) on h, which is in no collective for 5.1 s: it has waited 5.0 s for its next "
    "batch, and its main thread is in load (t.py:3).": [
        report(operation=(5.0, [1])),
        report(idle=5.1, input_wait=5.0),
    ],
    "1 of 2 ranks waits in all_reduce 'g' float32[3] sum (number 17 of 'workers') for 5.0 s for "
    "worker 1 (a:1), which does not respond, last heard from 4.0 s ago.": [
        report(operation=(5.0, [1])),
        None,
    ],
    "1 of 3 ranks waits in all_reduce 'g' float32[3] sum (number 17 of 'workers') for 5.0 s for "
    "workers 1 and 2.": [report(operation=(5.0, [1, 2])), report(idle=5.0), None],
    "2 of 2 ranks wait in all_reduce 'g' float32[3] sum (number 17 of 'workers') for 5.0 s: they "
    "wait for one another.": [
        report(operation=(5.0, [1])),
        report(operation=(4.0, [0]), number=18),
    ],
    "1 of 3 ranks waits in all_reduce 'g' float32[3] sum (number 17 of 'workers') for 1.5 s for "
    "worker 2 (a:2) on h, which is in no collective for 0.010 s.": [
        report(operation=(1.5, [1, 2])),
        report(operation=(0.1, [])),  # which rank 0 has not heard yet
        report(),
    ],
    "2 of 2 ranks wait in all_reduce 'g' float32[3] sum (number 17 of 'workers') for 5.0 s: all "
    "have joined it, and its data transfer is slow or stuck.": [
        report(operation=(5.0, [1])),  # which has come since
        report(operation=(4.0, [])),
    ],
    "1 of 2 ranks is running: 31 steps/s, 310 rows/s. worker 1 (a:1) is lost: killed.": [
        report(**STEPS),
        "is lost: killed",
    ],
}


def test_what_a_job_does_is_said_in_one_line():
    for expected, after in HEADLINES.items():
        found = view(*after)
        assert headline(found) == expected
        assert live_text(found).startswith(f"{expected}\n\nrank  host")
        assert json.loads(live_json("a:0", found))["headline"] == expected
    for expected, after in SLOWNESS.items():
        assert headline(view(*after, before=[OLD] * len(after))) == expected


@exhaustive
def test_rows_and_their_order():
    mib = 1 << 20
    after = [
        report(operation=(5.0, [2]), queued=3, steps=4, time=1.0),
        report(**STEPS, input=1.0, workers=0.5, network=9.0, sent_bytes=8 * mib),
        report(idle=5.0),
        None,
        "has left the job",
        {"error": "its report is too long"},
        report(operations=3),
        report(pid=8, **STEPS),
    ]
    before = [report(time=-2.0, steps=4), *[report(time=-2.0) for _ in after[1:]]]
    found = view(*after, before=before)
    lines = live_text(found).splitlines()[3:]
    assert [int(line.split()[0]) for line in lines] == [2, 3, 4, 5, 6, 0, 1, 7]
    by_rank = {int(line.split()[0]): re.split(r"  +", line.strip())[1:] for line in lines}
    assert by_rank[0][1:5] == ["4", "0", "0%", "100%"]
    assert by_rank[0][-1].endswith(" for 5.0 s, waits for rank 2, 3 more queued")
    assert by_rank[1][1:9] == ["62", "31", "50%", "25%", "100%", "4 MiB", "0 B", "512 MiB"]
    assert by_rank[1][-1] == "in no collective for 0.010 s"
    assert by_rank[3][-1] == "does not respond, last heard from 4.0 s ago"
    assert [by_rank[n][-1] for n in (4, 5, 6)] == [
        "has left the job",
        "its report is too long",
        "its report is malformed",
    ]
    assert by_rank[7][2] == "0"  # another process than before
    many = view(*[report() for _ in range(70)])
    assert live_text(many).endswith("\nand 6 more: --all")
    assert len(live_text(many, most=None).splitlines()) == 73


@exhaustive
@pytest.mark.parametrize("key", list(report()))
def test_reports_with_anything_in_them(key):
    for value in (
        None,
        "x",
        [],
        {},
        [[]],
        [{"what": 1}],
        [{**exchange(1.0)["operations"][0], "number": 1.5}],
        exchange(1.0)["operations"],
        [[7, 1, 1, 1, 1]],
        True,
        float("inf"),
        float("nan"),
        "\x1b[31m",
    ):
        found = view({**report(), key: value})
        assert found[0].state in ("answered", "failed")
        assert all(c.isprintable() or c == "\n" for c in live_text(found))
