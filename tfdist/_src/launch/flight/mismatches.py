"""The first collective of a communicator that differs between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter

from tfdist._src.launch.flight.clocks import doubt_ns
from tfdist._src.launch.flight.findings import Call, Mismatch
from tfdist._src.launch.flight.log import Record
from tfdist._src.launch.flight.merge import Group, Member

# Attribute of a record -> what people call it.
_AGREED = {
    "kind": "the kind",
    "name": "the name",
    "type": "the type",
    "shapes": "the shapes",
    "tensors": "the number of tensors",
    "elements": "the number of elements",
    "op": "the reduction",
    "root": "the root",
    "codec": "the compression",
    "forced_algorithm": "the algorithm (TFDIST_ALGORITHM)",
    "failures": "the number of failed steps",
}
_key = attrgetter(*_AGREED)


def find_mismatch(group: Group) -> Mismatch | None:
    """Finds the first collective at which ranks differ, if there is one.

    A log that was written before others began the collective does not count: it may be an earlier
    run's, whose collectives have the same numbers.
    """
    first: dict[int, tuple[object, ...]] = {}
    differing = set()
    for _, record in _collectives(group):
        key = _key(record)
        if first.setdefault(record.sequence, key) != key:
            differing.add(record.sequence)
    found: dict[int, list[tuple[Member, Record]]] = defaultdict(list)
    for member, record in _collectives(group):
        if record.sequence in differing:
            found[record.sequence].append((member, record))
    for sequence in sorted(differing):
        current = _current(found[sequence])
        if len({_key(record) for _, record in current}) > 1:
            return _describe(group.name, sequence, current)
    return None


def _collectives(group: Group) -> Iterator[tuple[Member, Record]]:
    for _, member in sorted(group.members.items()):
        for record in member.communicator.records:
            if not record.is_message:
                yield member, record


def _current(calls: list[tuple[Member, Record]]) -> list[tuple[Member, Record]]:
    """Those calls whose logs were written after the last one began."""
    last, record = max(calls, key=lambda call: call[0].time(call[1].begun_ns))
    begun = last.time(record.begun_ns)
    return [
        (member, own)
        for member, own in calls
        if member.written + doubt_ns(member.clock, last.clock) >= begun
    ]


def _describe(name: str, sequence: int, calls: list[tuple[Member, Record]]) -> Mismatch:
    made: dict[tuple[object, ...], list[tuple[Member, Record]]] = defaultdict(list)
    for member, record in calls:
        made[_key(record)].append((member, record))
    # Sorting is stable: of equally many, the lower ranks are first.
    most_first = sorted(made.values(), key=lambda same: -len(same))
    columns = zip(_AGREED.values(), zip(*made, strict=True), strict=True)
    return Mismatch(
        communicator=name,
        number=sequence,
        calls=tuple(
            Call(tuple(member.name for member, _ in same), same[0][1].what) for same in most_first
        ),
        differs=tuple(title for title, values in columns if len(set(values)) > 1),
        time=min(member.time(record.begun_ns) for member, record in calls) / 1e9,
    )
