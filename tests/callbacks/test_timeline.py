"""Timelines of real trainings are whole, and show who was slow; the training is the same."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import subprocess

import numpy as np
import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive
from tests.monitoring.traces import check, check_parts, count_arrows, lanes_of, slices_of

TIMED = "tests.callbacks.observing:timed"


def read(path):
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def steps_add_up(trace, rank):
    """What a step waits for, which is something, lies within it, one thing after the other."""
    steps = slices_of(trace, rank, "step")
    parts = sorted(
        slices_of(trace, rank, "input") + slices_of(trace, rank, "waiting"), key=lambda e: e["ts"]
    )
    for before, after in itertools.pairwise(parts):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.01, (before, after)
    for step in steps:
        inside = [p for p in parts if step["ts"] <= p["ts"] < step["ts"] + step["dur"]]
        assert sum(p["dur"] for p in inside) <= 1.05 * step["dur"]
        assert inside or len(trace["otherData"]["clocks"]) == 1
    return steps


def ops_belong_to_steps(trace, rank):
    """TensorFlow's operations are in the steps that ran them, by the clock of other lanes."""
    lanes = {lane for (pid, _), lane in lanes_of(trace).items() if pid == rank}
    ops = [
        op
        for lane in lanes
        if lane.startswith("TensorFlow: ")
        for op in slices_of(trace, rank, lane)
    ]
    for step in slices_of(trace, rank, "step"):
        begin, end = step["ts"], step["ts"] + step["dur"]
        inside = [op for op in ops if begin <= op["ts"] and op["ts"] + op["dur"] <= end]
        kinds = [op["name"].rpartition(":")[2] for op in inside]
        # Two layers forward, and backward without the gradient of the input.
        assert sum(kind.endswith("MatMul") for kind in kinds) >= 4, kinds
        updates = slices_of(trace, rank, "optimizer")
        (update,) = [u for u in updates if begin <= u["ts"] < end]
        roots = [op for op in inside if op["name"].endswith(":Sqrt")]  # of Adam
        assert roots
        for root in roots:
            assert update["ts"] <= root["ts"] + 500
            assert root["ts"] + root["dur"] <= update["ts"] + update["dur"] + 500


@exhaustive
@pytest.mark.parametrize(
    ("group", "kind"),
    [
        ("2", "fit"),
        ("3", "fit"),
        ("2", "several"),
        ("2x2", "fit"),
        ("2 hosts", "fit"),
        ("4 on 2 hosts", "fit"),
        ("2 hosts", "int8"),
        ("2 hosts", "powersgd"),
        ("4 on 2 hosts", "randomk"),
        ("2", "1f1b"),
        ("2 hosts", "zb_h1"),
        ("3", "1f1b"),
        ("1", "fit"),
        ("2", "profiler"),
    ],
)
def test_a_timeline_of_all_workers(group, kind, tmp_path):
    path = tmp_path / "traces" / "trace.json.gz"  # The folder is made.
    results = GROUPS[group].run(TIMED, str(path), kind)
    for watched, unwatched in results:
        for one, other in zip(watched, unwatched, strict=True):
            np.testing.assert_array_equal(one, other)
    trace = read(path)
    check(trace)
    workers = len(results)
    clocks = trace["otherData"]["clocks"]
    assert list(clocks) == [str(rank) for rank in range(workers)]
    if "hosts" not in group:
        # The workers of a host have one clock.
        assert [c["uncertainty_us"] for c in clocks.values()] == [0] * workers
        assert [c["offset_us"] for c in clocks.values()] == [0] * workers
    for rank in range(workers):
        steps = steps_add_up(trace, rank)
        names = [step["name"] for step in steps]
        several = kind == "several"
        assert names == (
            ["steps 6 to 7", "steps 8 to 9"] if several else [f"step {n}" for n in range(5, 9)]
        )
        if workers > 1:
            assert len(slices_of(trace, rank, "input")) == (4 if several else len(steps))
            assert slices_of(trace, rank, "optimizer")
            assert slices_of(trace, rank, "waiting")
            if group != "2x2":  # Its gradients have lanes for each device.
                check_parts(trace, rank, "workers")
    lanes = {name for (rank, _), name in lanes_of(trace).items() if rank == 0}
    kinds = {e["name"] for e in trace["traceEvents"]}
    if kind in ("1f1b", "zb_h1"):
        # Four microbatches forward and backward in each of four steps.
        actions = [e["name"] for e in slices_of(trace, 0, "pipeline")]
        assert actions.count("F0.0") == 4
        # Each of them from stage to stage, and back.
        assert count_arrows(trace) >= 4 * 4 * 2 * (workers - 1)
    elif workers > 1 and group != "2x2":
        assert "workers" in lanes
        assert {"all_reduce rows", "all_reduce gradients", "all_reduce metrics"} <= kinds
    if group == "4 on 2 hosts":
        assert {"within the host", "between hosts"} <= kinds
    if kind == "profiler":
        for rank in range(workers):
            ops_belong_to_steps(trace, rank)
    else:
        assert not any(lane.startswith("TensorFlow") for lane in lanes)
    if kind == "int8":
        assert any(name.startswith("encode and decode") for name in kinds)
    if kind in ("powersgd", "randomk"):
        spans = slices_of(trace, 0, "compression")
        for done in ("encode", "decode"):
            # One in each step.
            assert sum(e["name"].startswith(f"{done} by {kind}") for e in spans) >= 4


def total(slices, name=""):
    """Seconds of those whose name begins so."""
    return 1e-6 * sum(e["dur"] for e in slices if e["name"].startswith(name))


def waits_for(trace, rank, other):
    """Seconds in which a worker's collectives and messages waited for another one."""
    waits = [slices_of(trace, rank, lane) for (r, _), lane in lanes_of(trace).items() if r == rank]
    return total(itertools.chain(*waits), f"wait for worker {other} (")


@exhaustive
@pytest.mark.parametrize(
    ("group", "kind", "place", "slow", "fault"),
    [
        ("2", "fit", "compute", 1, "sleeps"),
        ("3", "fit", "compute", 0, "sleeps"),
        ("2 hosts", "int8", "compute", 0, "sleeps"),
        ("4 on 2 hosts", "fit", "compute", 1, "sleeps"),
        ("2x2", "fit", "compute", 0, "sleeps"),
        ("3", "1f1b", "compute", 1, "sleeps"),
        ("3", "fit", "input", 1, "sleeps"),
        ("2x2", "fit", "input", 0, "sleeps"),
        ("4 on 2 hosts", "int8", "input", 2, "sleeps"),
        ("2 hosts", "1f1b", "input", 0, "sleeps"),
        ("2", "1f1b", "input", 1, "sleeps"),
        ("2", "fit", "callback", 0, "is stopped"),
        ("4 on 2 hosts", "fit", "callback", 3, "is stopped"),
        ("3", "int8", "callback", 2, "is stopped"),
        ("2 hosts", "1f1b", "callback", 1, "is stopped"),
    ],
)
def test_a_late_worker_is_the_one_waited_for(group, kind, place, slow, fault, tmp_path):
    path, late = tmp_path / "trace.json", 0.2
    arguments = (str(path), kind, place, slow, fault, late)
    workers = range(len(GROUPS[group].run(f"{TIMED}_with_a_late_worker", *arguments)))
    trace = read(path)
    check(trace)
    for rank in workers:
        assert len(steps_add_up(trace, rank)) == 4
    slept = 4 * late
    inputs = [total(slices_of(trace, rank, "input")) for rank in workers]
    waited = [total(slices_of(trace, rank, "waiting"), "workers") for rank in workers]
    for rank in workers:
        if rank == slow:
            assert (inputs[rank] > 0.8 * slept) == (place == "input")
            continue
        assert inputs[rank] < 0.5 * slept
        assert waited[rank] > 0.8 * slept > waited[slow]
        assert waits_for(trace, rank, slow) > 0.8 * slept
    straggler, what = (
        trace["otherData"]["straggler"],
        "input" if place == "input" else "computation",
    )
    assert straggler.startswith(f"worker {slow} (") and f"waiting: its {what} takes" in straggler


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two pages, one of which holds an old timeline."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = mount("-t", "tmpfs", "-o", "size=8k", "tmpfs", str(folder))
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        (folder / "trace.json").write_text("an old one")
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def mount(*words):
    return subprocess.run(["mount", *words], capture_output=True, text=True)


@exhaustive
@pytest.mark.parametrize(
    ("options", "reason"),
    [("rw", "No space left on device"), ("ro", "Read-only file system")],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_no_file(small_disk, options, reason):
    path = small_disk / "trace.json"
    assert mount("-o", f"remount,{options}", str(small_disk)).returncode == 0
    lines = GROUPS["2"].run("tests.callbacks.observing:not_written", str(path))
    assert len(lines[0]) == 1 and "could not be written" in lines[0][0] and reason in lines[0][0]
    assert lines[1] == []
    assert path.read_text() == "an old one"
    assert list(small_disk.iterdir()) == [path]
    # Once there is room, the same training writes it.
    assert mount("-o", "remount,rw,size=16m", str(small_disk)).returncode == 0
    GROUPS["2"].run("tests.callbacks.observing:not_written", str(path))
    check(read(path))


@exhaustive
@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_chief_that_is_killed_while_it_writes(moment, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("an old one")
    ended = GROUPS["alone"].run("tests.callbacks.observing:killed_while_writing", str(path), moment)
    assert ended == [signal.SIGXFSZ if moment == "write" else signal.SIGKILL]
    assert path.read_text() == "an old one"
    (rest,) = set(tmp_path.iterdir()) - {path}
    assert rest.stat().st_size == (500_000 if moment == "write" else 1_000_000)
    # Neither listed nor opened as a trace.
    assert rest.name.startswith(".") and rest.suffix not in (".json", ".gz")


@exhaustive
def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "trace.json"
    lines = GROUPS["2"].run("tests.callbacks.observing:not_written", str(path))
    assert len(lines[0]) == 1 and "could not be written" in lines[0][0]
    assert lines[1] == []


@exhaustive
def test_too_much_to_send(tmp_path):
    path = tmp_path / "trace.json"
    lines = GROUPS["2"].run("tests.callbacks.observing:too_much_to_send", str(path), 2)
    for said in lines:
        assert "spans are missing" in said[0] and "Choose fewer `steps`" in said[0]
    assert not slices_of(read(path), 1, "step")


@exhaustive
def test_steps_that_do_not_come(tmp_path):
    path = tmp_path / "trace.json"
    lines = GROUPS["2"].run("tests.callbacks.observing:too_late", str(path))
    assert len(lines[0]) == 1 and "training ended after 5 steps" in lines[0][0]
    assert not path.exists()


@exhaustive
def test_a_profiler_in_use(tmp_path):
    path = tmp_path / "trace.json"
    lines = GROUPS["2"].run(
        "tests.callbacks.observing:profiled_by_another", str(path), str(tmp_path / "board")
    )
    for said in lines:
        assert len(said) == 1 and "profile_batch=0" in said[0]
    check(read(path))
