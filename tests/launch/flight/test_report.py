"""Reading a folder, and what is printed about it."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from tests.harness.tiers import exhaustive
from tests.launch.flight.logs import (
    STACK,
    START,
    diagnosis,
    group,
    log,
    name,
    names,
    peer,
    record,
    write,
)
from tfdist._src.launch.cli import main
from tfdist._src.launch.flight import findings
from tfdist._src.launch.flight.diagnosis import user_frames
from tfdist._src.launch.flight.findings import Total

WAITING = [record(n, n, n + 0.5, last=(3, n + 0.25)) for n in (1, 2)] + [record(3, 10)]
ABSENT = [record(1, 1, 1.5, last=(-1, 1.25)), record(2, 2, 2.5, last=(0, 2.125))]
JOB = [log(r, group(r, WAITING), reasons=[(40, "stall", "It waits.")]) for r in range(3)]
JOB.append(log(3, group(3, ABSENT), stacks=STACK))


def test_clocks(tmp_path):
    def times(*logs):
        return [round(one.written - START, 3) for one in diagnosis(tmp_path, *logs).workers]

    # 0 has compared its clock with 1's, 2 with 1's; 3 with none, and its Unix time is 7 s ahead.
    ahead = {"steady": 1000.0, "unix": 50.0}
    known = {
        0: [peer(1, 0, 0, clock_offset_ns=1_000_000_000_000, clock_uncertainty_ns=5)],
        2: [peer(1, 0, 0, clock_offset_ns=1_000_000_000_000, clock_uncertainty_ns=5)],
    }
    logs = [
        log(0, group(0, peers=known[0]), written=60),
        log(1, group(1), written=61, **ahead),
        log(2, group(2, peers=known[2]), written=62, unix=-9.0),
        log(3, group(3), written=63, unix=7.0),
    ]
    assert times(*logs) == [60, 61, 62, 70]
    found = diagnosis(tmp_path, *logs)
    assert [one.clock for one in found.workers] == ["compared"] * 3 + ["unix"]
    # Without the one in the middle, all have Unix time alone.
    assert times(logs[0], logs[2], logs[3]) == [60, 53, 70]
    # Ranks of one host have one clock.
    hosts = [0, 1, 0, 1]
    pair = [log(r, group(r, peers=[peer(2 - r, 0, 0)], hosts=hosts), unix=r) for r in (0, 2)]
    assert times(*pair) == [60, 60]
    # Clocks that were not compared are trusted to a second only.
    for written, has_joined in ((11.5, "unclear"), (12.5, "absence")):
        later = log(1, group(1, [], (0, 1)), written=written)
        waiting = log(0, group(0, [record(1, 10)], (0, 1)))
        assert [one.kind for one in diagnosis(tmp_path, waiting, later).findings] == [has_joined]


@exhaustive
def test_totals_and_stacks(tmp_path):
    assert diagnosis(tmp_path, *JOB).totals == (
        Total(name(3), 1.5, 0.125),
        Total(name(0), 0.125, 0.5),
        Total(name(1), 0.0, 0.5),
        Total(name(2), 0.0, 0.5),
    )
    # Rank 1 comes last; rank 2, on another host, notices that of its neighbour, rank 0.
    logs = [
        log(r, group(r, [record(1, begun, 6.0, last=last)], hosts=[0, 0, 1, 1]))
        for r, (begun, last) in enumerate(
            [(1, (1, 5.5)), (5, (-1, 0)), (2, (0, 5.5)), (3, (1, 5.5))]
        )
    ]
    assert diagnosis(tmp_path, *logs).totals[0] == Total(name(1), 4.5 + 3.5 + 2.5, 0.0)
    inner, outer = "load (/app/data.py:12)", "<module> (/app/train.py:40)"
    worker = STACK.partition("Current")[0]
    frame = '  File "/app/x.py", line {} in f\n'
    cases = [
        (STACK, "train.py", (inner, outer)),
        (
            STACK,
            "trainer.py",
            (
                inner,
                "fit (/venv/lib/python3.11/site-packages/keras/src/trainers/trainer.py:7)",
                outer,
            ),
        ),
        (
            STACK.partition('  File "/app/data')[0],
            "train.py",
            ("read (/usr/lib/python3.11/gzip.py:301)",),
        ),
        (STACK.replace("Current t", "T") + worker, "train.py", (inner, outer)),
        (worker + '  File "/app/x.py", line 1 in <module>\n' + STACK, "train.py", (inner, outer)),
        (
            "Thread 0x1 [name] (most recent call first):\n" + "".join(map(frame.format, range(9))),
            "",
            tuple(f"f (/app/x.py:{n})" for n in range(3)),
        ),
        ("", "train.py", ()),
        ("nonsense", "train.py", ()),
    ]
    for stacks, program, frames in cases:
        assert user_frames(stacks, program) == frames


def test_files_that_cannot_be_used(tmp_path, capsys):
    folder = write(tmp_path / "logs", *JOB)
    good = (folder / "flight-rank0.json").read_text()
    files = {
        "flight-rank10.json": (good[:-9], "it is damaged, or no flight log"),
        "flight-rank11.json": ("[" * 100_000, "it is damaged, or no flight log"),
        "flight-rank12.json": ("[]", "it is damaged, or no flight log"),
        "flight-rank13.json": (
            '{"format": 2}',
            "it has format 2, and this version of tfdist reads 1",
        ),
        "flight-rank14.json": ('{"format": 1}', "it is damaged: 'clock'"),
        "flight-rank15.json": (
            good.replace('"sequence": 1,', '"sequence": "1",'),
            "it is damaged: sequence in records has a wrong type",
        ),
        "flight-rank16.json": (
            good.replace('"last": 3', '"last": 4'),
            "it is damaged: the ranks of communicator 'workers' are inconsistent",
        ),
        "flight-rank17.json": (good, "it is a second log of rank 0"),
        "flight-rank18.json": (
            json.dumps(log(1, size=8, written=0)),
            "it is of a job of 8 workers, the newest log of 4",
        ),
        "flight-rank19.json": ("\xff", "it is damaged, or no flight log"),
    }
    for file, (text, _) in files.items():
        (folder / file).write_bytes(text.encode("latin-1"))
    (folder / "flight-rank20.json").mkdir()
    (folder / "worker-1.log").write_text("other")
    (folder / "flight-rank1.json.tmp").write_text("{")
    # A newer version of the same format may add keys.
    (folder / "flight-rank1.json").write_text(json.dumps({**JOB[1], "more": 1}))
    assert main(["doctor", "--flight", str(folder)]) == 0
    out = capsys.readouterr().out
    skipped = [line for line in out.splitlines() if line.startswith("Skipped ")]
    expected = [f"Skipped {file}: {why}." for file, (_, why) in files.items()]
    assert sorted(skipped) == sorted([*expected, "Skipped flight-rank20.json: Is a directory."])
    assert out.startswith(
        f"Flight logs of 4 of 4 workers in {folder}, written 2023-11-14 22:14:20 "
    )


def test_the_command(tmp_path, capsys):
    folder = write(tmp_path / "logs", *JOB[1:])
    assert main(["doctor", "--flight", str(folder)]) == 0
    text = capsys.readouterr().out
    assert main(["doctor", "--flight", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "format",
        "folder",
        "skipped",
        "size",
        "without_log",
        "findings",
        "totals",
        "step_communication",
        "workers",
    ]
    assert found["without_log"] == names(0)
    (finding,) = found["findings"]
    assert finding["kind"] == "absence"
    assert finding["time"] == START + 10
    assert [one["worker"] for one in finding["absent"]] == names(0, 3)
    lines = text.splitlines()
    assert f"No log of {name(0)}." in lines
    assert f"  1. {finding['text'].partition(f' {name(0)}: It')[0]}" in lines
    table = lines[lines.index("Waits in the recorded operations:") + 2 :][:4]
    assert table[0].split()[-4:] == ["1.0", "s", "0.125", "s"]
    for line in (
        f"  {name(1)}, process 101 (train.py) on node-1:",
        "    in all_reduce '0' float32[5] sum (number 3 of 'workers') for 50.0 s",
        "    12 steps begun; log written 22:14:20 UTC (stall: It waits.)",
        "    all_reduce '0' float32[5] sum (number 2 of 'workers') ended 57.5 s before the log",
    ):
        assert line in lines
    # What ended last, of all communicators.
    parts = [group(0, [record(1, 1, end)], called=called) for called, end in (("a", 2), ("b", 3))]
    (state,) = diagnosis(tmp_path / "one", log(0, *parts)).workers
    assert [last.operation.communicator for last in state.last] == ["b"]
    # The page names every key.
    page = (Path(__file__).parents[3] / "docs/monitoring.md").read_text()
    kinds = [kind for kind in vars(findings).values() if is_dataclass(kind)]
    keys = {field.name for kind in kinds for field in fields(kind)} | {*log(0), *group(0)}
    keys |= {*record(1, 1), *peer(1, 1, 1), "session"}
    assert [key for key in sorted(keys) if f"`{key}`" not in page and f'"{key}"' not in page] == []
    # A log from long before is named. Long tables are cut.
    main(["doctor", "--flight", str(write(folder, *JOB[:3], {**JOB[3], **log(3, written=-1)}))])
    assert f"perhaps of an earlier run: {name(3)}." in capsys.readouterr().out
    many = [log(r, group(r, WAITING[:2], range(20)), size=20) for r in range(20)]
    main(["doctor", "--flight", str(write(folder, *many))])
    lines = capsys.readouterr().out.splitlines()
    table = lines[
        lines.index("Waits in the recorded operations:") + 2 : lines.index("  and 4 more")
    ]
    assert len(table) == 16
    # Nothing to read, in one line.
    (tmp_path / "empty").mkdir()
    for path, said in (("empty", "has no flight log that can be read"), ("none", "cannot be read")):
        assert main(["doctor", "--flight", str(tmp_path / path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"tfdist doctor: error: {tmp_path / path} {said}")
        assert error.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["doctor", "--json"])
    assert "add --flight DIR" in capsys.readouterr().err
