"""Checks of a whole trace."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


def lanes_of(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    """The name of each lane, by worker and number."""
    events = trace["traceEvents"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def slices_of(trace: dict[str, Any], rank: int, lane: str) -> list[dict[str, Any]]:
    """A worker's slices in a lane, in the order of time."""
    lanes = lanes_of(trace)
    found = [
        e
        for e in trace["traceEvents"]
        if e["ph"] == "X" and e["pid"] == rank and lanes[rank, e["tid"]] == lane
    ]
    return sorted(found, key=lambda e: (e["ts"], -e["dur"]))


def check(trace: dict[str, Any]) -> None:
    """Every lane has a name, slices are nested, beginnings have ends, arrows go forward in time."""
    lanes = lanes_of(trace)
    uncertainty = {int(r): c["uncertainty_us"] for r, c in trace["otherData"]["clocks"].items()}
    nested = defaultdict(list)
    pairs = defaultdict(list)
    arrows = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            continue
        assert (event["pid"], event["tid"]) in lanes, event
        assert event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            nested[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "be":
            pairs[event["id"]].append((event["ts"], event["ph"]))
        elif event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]], event
            arrows[event["id"]][event["ph"]] = event
        else:
            assert event["ph"] == "i", event
    for spans in nested.values():
        _check_nested(spans)
    for found in pairs.values():
        assert [kind for _, kind in sorted(found)] == ["b", "e"], found
    for ends in arrows.values():
        if len(ends) == 2:  # the other may lie outside of the steps
            send, receive = ends["s"], ends["f"]
            wrong = sum(uncertainty[e["pid"]] or 0 for e in (send, receive))
            assert receive["ts"] >= send["ts"] - wrong, ends


def count_arrows(trace: dict[str, Any]) -> int:
    """The arrows that have both ends, on two workers."""
    ends = defaultdict(set)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            ends[event["id"]].add((event["ph"], event["pid"]))
    return sum(
        {kind for kind, _ in found} == {"s", "f"} and len({rank for _, rank in found}) == 2
        for found in ends.values()
    )


def check_parts(trace: dict[str, Any], rank: int, lane: str) -> None:
    """A worker's collectives and messages in a lane are their waiting and their moving."""
    slices = slices_of(trace, rank, lane)
    parts = [e for e in slices if e["name"] == "move" or e["name"].startswith("wait for ")]
    whole = [e for e in slices if "args" in e]
    assert whole
    for one in whole:
        begin, end = one["ts"], one["ts"] + one["dur"]
        inside = sum(
            e["dur"] for e in parts if begin <= e["ts"] and e["ts"] + e["dur"] <= end + 0.01
        )
        assert abs(inside - one["dur"]) <= 0.05 * one["dur"] + 0.01, one


def _check_nested(spans: list[tuple[float, float]]) -> None:
    rounding = 0.002  # microseconds
    stack: list[tuple[float, float]] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while stack and stack[-1][1] <= begin + rounding:
            stack.pop()
        assert not stack or end <= stack[-1][1] + rounding, (stack[-1], (begin, end))
        stack.append((begin, end))
