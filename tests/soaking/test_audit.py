"""The audit of a soak finds whatever is wrong, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from tests.harness.tiers import exhaustive
from tests.soaking.audit import (
    Records,
    check_exits,
    check_left,
    check_result,
    check_rows,
    check_steps,
    check_weights,
    is_settled,
    standing,
)
from tests.soaking.records import Ended, Fed, Finished, Record, Recorder, parse, read

ROWS = frozenset(range(1, 9))


def training() -> dict[int, list[Record]]:
    """Two epochs of two steps of four rows: process 11 dies in step 2, and 12 joins for step 4.

    Step 2 fails, and is trained again without 11. In step 3 worker 10 is alone.
    """
    return {
        10: [
            Fed(0, 1, 0, (1, 2, 3, 4)),
            Ended(1, 0, "a"),
            Fed(0, 2, 0, (5, 6, 7, 8)),
            Fed(0, 2, 1, (5, 6, 7, 8)),
            Ended(2, 1, "b"),
            Fed(1, 3, 1, (8, 7, 6, 5)),
            Ended(3, 1, "c"),
            Fed(1, 4, 2, (4, 3, 2, 1)),
            Ended(4, 2, "d"),
            Finished("d"),
        ],
        11: [Fed(0, 1, 0, (1, 2, 3, 4)), Ended(1, 0, "a"), Fed(0, 2, 0, (5, 6, 7, 8))],
        12: [Fed(1, 4, 2, (4, 3, 2, 1)), Ended(4, 2, "d"), Finished("d")],
    }


def audit(records: Records) -> list[str]:
    return [
        *check_steps(records, 4),
        *check_weights(records),
        *check_rows(records, ROWS, 2),
    ]


def changed(process: int, index: int, record: Record | None = None, **values: object) -> Records:
    """That training with a record replaced, changed or, without any value, left out."""
    records = training()
    if values:
        record = dataclasses.replace(records[process][index], **values)  # type: ignore[arg-type]
    records[process][index : index + 1] = [] if record is None else [record]
    return records


def test_the_audit_finds_what_is_wrong() -> None:
    assert audit(training()) == []
    # The other worker has ended the step in which a worker died.
    died_later = changed(10, 3, generation=0)
    died_later[10][4] = Ended(2, 0, "b")
    assert audit(died_later) == []
    for records, expected in [
        (changed(12, 1, weights="x"), ["the weights differ after step 4"]),
        (changed(12, 2, weights="x"), ["the weights differ in the end"]),
        (
            changed(10, 5, rows=(8, 7, 6, 6)),
            ["epoch 1 lacks row 5", "epoch 1 has row 6 more than once"],
        ),
        (
            changed(10, 5, rows=(8, 7, 6, 9)),
            ["epoch 1 lacks row 5", "epoch 1 has row 9, which does"],
        ),
        (changed(10, 5), ["epoch 1 lacks row 5, 6, 7, 8"]),
        (changed(10, 5, epoch=2), ["step 3 is of epoch 2", "epoch 1 lacks row 5, 6, 7, 8"]),
        (changed(12, 0, rows=(4, 3, 1, 2)), ["the workers were fed different rows in step 4"]),
        (changed(12, 0, epoch=0), ["the workers were fed different rows in step 4"]),
        (changed(10, 2, Ended(2, 0, "z")), ["process 10 has ended step 2 after 2"]),
        (changed(10, 6), ["no worker has ended step 3"]),
        (changed(10, 6, step=5), ["process 10 has ended step 5 after 2"]),
        (changed(10, 8, generation=0), ["process 10 went back to generation 0"]),
    ]:
        found = audit(records)
        for line in expected:
            assert any(wrong.startswith(line) for wrong in found), (expected, found)
    nobody = {11: training()[11]}
    assert "no worker has trained to the end" in audit(nobody)
    assert "no worker has ended step 2, 3, 4" in audit(nobody)


@exhaustive
def test_a_step_stands_in_its_last_generation() -> None:
    records = training()
    records[11].append(Ended(2, 0, "z"))  # It died when it alone had ended the step.
    assert standing(records) == {1: 0, 2: 1, 3: 1, 4: 2}
    assert audit(records) == []


@exhaustive
def test_a_group_has_settled_when_it_trains_without_the_others() -> None:
    records = training()
    assert is_settled(records, {10, 12})
    assert not is_settled(records, {10, 11}) and not is_settled(records, {10, 11, 12})
    before = {process: list(found[:2]) for process, found in records.items() if process != 12}
    assert is_settled(before, {10, 11}) and not is_settled(before, {10})
    assert not is_settled({}, {10})


@exhaustive
def test_the_result_is_compared_with_an_undisturbed_one() -> None:
    weights = [np.ones(3), np.zeros((2, 2))]
    assert check_result(weights, [w + 1e-7 for w in weights]) == []
    (wrong,) = check_result([weights[0], weights[1] + 1e-3], weights)
    assert wrong.startswith("weight 1 is 0.001 from")
    assert check_result(weights[:1], weights) == ["there are 1 weights instead of 2"]
    assert check_result([weights[0] * np.nan, weights[1]], weights) != []


@exhaustive
def test_ends_and_what_is_left() -> None:
    allowed = {2: {-9}, 3: {0, 75}}
    assert check_exits({1: 0, 2: -9, 3: 75}, allowed) == []
    assert check_exits({1: 1, 2: 0, 3: None}, allowed) == [
        "process 1 has ended with exit code 1",
        "process 2 has ended with exit code 0",
        "process 3 does not end",
    ]
    before = {"segments": {"a"}, "ports": set[str]()}
    assert check_left(before, {"segments": {"a"}, "ports": set()}) == []
    assert check_left(before, {"segments": {"a", "b"}, "ports": {"7", "5"}}) == [
        "segments left: b",
        "ports left: 5, 7",
    ]


@exhaustive
def test_records_are_read_as_they_are_written(tmp_path: Path) -> None:
    records = training()[10]
    recorder = Recorder(tmp_path)
    for record in records:
        recorder.write(record)
    (found,) = read(tmp_path).values()
    assert found == records
    text = next(tmp_path.iterdir()).read_text()
    assert parse(text[:-1]) == records[:-1]
    assert json.loads(text.split("\n")[0])["kind"] == "Fed"
