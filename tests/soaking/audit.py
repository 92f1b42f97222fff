"""Whether a training in which workers came and went is what it should be."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from tests.soaking.records import Ended, Fed, Finished, Record

Records = Mapping[int, Sequence[Record]]  # by the processes' numbers


def standing(records: Records) -> dict[int, int]:
    """For each step that has ended, the generation in which it stands: the last one."""
    found: dict[int, int] = {}
    for record in _all(records, Ended):
        found[record.step] = max(found.get(record.step, 0), record.generation)
    return found


def is_settled(records: Records, members: Set[int]) -> bool:
    """Whether the newest group that has ended a step is of exactly these processes."""
    newest = max((record.generation for record in _all(records, Ended)), default=-1)
    trained = {
        process
        for process, of_process in records.items()
        if any(isinstance(r, Ended) and r.generation == newest for r in of_process)
    }
    return trained == members


def check_steps(records: Records, steps: int) -> list[str]:
    """Every step stands; no process has ended one twice, or has left one out while it trained."""
    wrong = []
    missing = sorted(set(range(1, steps + 1)) - set(standing(records)))
    if missing:
        wrong.append(f"no worker has ended step {_some(missing)}")
    for process, of_process in records.items():
        ended = [record for record in of_process if isinstance(record, Ended)]
        for before, after in itertools.pairwise(ended):
            moves = after.generation - before.generation
            # Who was a step behind takes the state of another when a new group begins.
            if after.step <= before.step or (not moves and after.step != before.step + 1):
                wrong.append(f"process {process} has ended step {after.step} after {before.step}")
            if moves < 0:
                wrong.append(
                    f"process {process} went back to generation {after.generation} from "
                    f"{before.generation} in step {after.step}"
                )
    return wrong


def check_weights(records: Records) -> list[str]:
    """All that have ended a step in the generation in which it stands have the same weights."""
    stands = standing(records)
    weights: dict[int, set[str]] = defaultdict(set)
    for record in _all(records, Ended):
        if record.generation == stands[record.step]:
            weights[record.step].add(record.weights)
    wrong = [f"the weights differ after step {s}" for s, found in weights.items() if len(found) > 1]
    finished = {record.weights for record in _all(records, Finished)}
    if len(finished) > 1:
        wrong.append("the weights differ in the end")
    if not finished:
        wrong.append("no worker has trained to the end")
    return wrong


def check_rows(records: Records, rows: Set[int], epochs: int) -> list[str]:
    """Every row was trained exactly once in each epoch, by the steps that stand.

    Each worker records all rows of a batch, because a Python function in a step receives the whole
    batch, as in one process. If a worker was fed twice in a generation, the first step failed.
    """
    stands = standing(records)
    fed_in: dict[int, Fed] = {}
    wrong = []
    for of_process in records.values():
        last: dict[int, Fed] = {}
        for record in of_process:
            if isinstance(record, Fed) and stands.get(record.step) == record.generation:
                last[record.step] = record
        for fed in last.values():
            known = fed_in.setdefault(fed.step, fed)
            if (fed.epoch, fed.rows) != (known.epoch, known.rows):
                wrong.append(f"the workers were fed different rows in step {fed.step}")
    seen: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
    for fed in fed_in.values():
        if fed.epoch in seen:
            seen[fed.epoch].update(fed.rows)
        else:
            wrong.append(f"step {fed.step} is of epoch {fed.epoch}")
    for epoch, counts in seen.items():
        if missing := sorted(rows - set(counts)):
            wrong.append(f"epoch {epoch} lacks row {_some(missing)}")
        if twice := sorted(row for row, count in counts.items() if count > 1):
            wrong.append(f"epoch {epoch} has row {_some(twice)} more than once")
        if strange := sorted(set(counts) - rows):
            wrong.append(f"epoch {epoch} has row {_some(strange)}, which does not exist")
    return wrong


def check_result(
    weights: Sequence[Any], undisturbed: Sequence[Any], tolerance: float = 1e-5
) -> list[str]:
    """The weights in the end are those of a training without any fault."""
    if len(weights) != len(undisturbed):
        return [f"there are {len(weights)} weights instead of {len(undisturbed)}"]
    wrong = []
    for i, (found, expected) in enumerate(zip(weights, undisturbed, strict=True)):
        if not np.allclose(found, expected, rtol=tolerance, atol=tolerance):
            distance = float(np.max(np.abs(np.asarray(found) - np.asarray(expected))))
            wrong.append(f"weight {i} is {distance:.2g} from that of an undisturbed training")
    return wrong


def check_exits(codes: Mapping[int, int | None], allowed: Mapping[int, Set[int]]) -> list[str]:
    """Every process has ended as it may.

    Args:
        codes: exit codes by processes, negative for signals; None for one that runs.
        allowed: for those to which something was done; the others exit with 0.
    """
    wrong = []
    for process, code in codes.items():
        if code is None:
            wrong.append(f"process {process} does not end")
        elif code not in allowed.get(process, {0}):
            wrong.append(f"process {process} has ended with exit code {code}")
    return wrong


def check_left(before: Mapping[str, Set[str]], after: Mapping[str, Set[str]]) -> list[str]:
    """Nothing is left, by kinds of things: processes, segments, files, ports."""
    return [
        f"{kind} left: {', '.join(sorted(found - before.get(kind, set())))}"
        for kind, found in after.items()
        if found - before.get(kind, set())
    ]


def _all(records: Records, kind: type[Any]) -> list[Any]:
    return [r for of_process in records.values() for r in of_process if isinstance(r, kind)]


def _some(numbers: Sequence[int], most: int = 5) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more
