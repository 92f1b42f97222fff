"""The monitor names the worker that is slow, and why."""

from __future__ import annotations

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive

BEHAVIOURS = "tests.callbacks.observing"
WORDS = {
    "compute": "its computation takes",
    "input": "its input takes",
    "callback": "its computation takes",
}


@exhaustive
@pytest.mark.parametrize(
    ("group", "kind", "place", "slow", "fault"),
    [
        *(
            (group, "fit", place, slow, "sleeps")
            for place in ("compute", "input")
            for group, slow in [("2", 1), ("2", 0), ("3", 2), ("4 on 2 hosts", 1), ("2 hosts", 1)]
        ),
        ("4", "fit", "compute", 0, "sleeps"),
        ("2x2", "fit", "compute", 0, "sleeps"),
        ("2x2", "fit", "input", 1, "sleeps"),
        ("4 on 2 hosts", "int8", "compute", 0, "sleeps"),
        ("2 hosts", "int8", "input", 0, "sleeps"),
        ("2", "1f1b", "compute", 0, "sleeps"),
        ("3", "1f1b", "compute", 1, "sleeps"),
        ("4 on 2 hosts", "1f1b", "compute", 2, "sleeps"),
        # The first stage reads the inputs, and the last one the targets.
        ("2 hosts", "1f1b", "input", 0, "sleeps"),
        ("3", "1f1b", "input", 2, "sleeps"),
        ("2", "fit", "callback", 1, "is stopped"),
        ("3", "int8", "callback", 0, "is stopped"),
        ("4 on 2 hosts", "fit", "callback", 3, "is stopped"),
        ("2 hosts", "1f1b", "callback", 1, "is stopped"),
    ],
)
def test_a_slow_worker_is_named(group, kind, place, slow, fault):
    lines, *others = GROUPS[group].run(f"{BEHAVIOURS}:straggling", kind, place, slow, fault)
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"worker {slow} (127.0.0.1:")
    assert "keeps the others waiting" in lines[0]
    assert WORDS[place] in lines[0]
    assert others == [[]] * len(others)  # The chief alone tells.


@exhaustive
@pytest.mark.parametrize(("every", "more"), [(10, 4), (7, 5), (100, 0)])
def test_one_small_collective_now_and_then(every, more):
    for without, with_monitor in GROUPS["2 hosts"].run(f"{BEHAVIOURS}:counted_collectives", every):
        expected = without | {"all_gather": without["all_gather"] + more}
        assert with_monitor == expected


@exhaustive
def test_the_line_comes_again_when_it_changes():
    lines, _ = GROUPS["2"].run(f"{BEHAVIOURS}:straggling_for_a_while")
    named = [line.split(" (")[0] for line in lines]
    assert named[:2] == ["worker 0", "worker 1"]
    assert lines[-1].endswith("no longer keeps the others waiting.")


@exhaustive
@pytest.mark.parametrize("group", ["1", "2 by TensorFlow"])
def test_without_the_native_collectives_it_has_no_effect(group):
    for lines in GROUPS[group].run(f"{BEHAVIOURS}:straggling", "fit", "compute", 0):
        assert lines == []


@exhaustive
@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("StragglerMonitor", True),
        ("Timeline", True),
        ("ReplicaAudit", True),
        ("ThroughputLogger", False),
        ("TrafficLogger", False),
    ],
)
def test_a_callback_of_one_worker_hangs_nobody(name, refused, tmp_path):
    path = str(tmp_path / "trace.json")
    errors = GROUPS["2"].run(f"{BEHAVIOURS}:given_to_one", name, path)
    assert len(set(errors)) == 1
    assert (name in errors[0]) == refused
