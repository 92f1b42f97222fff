"""The first collective of a communicator that differs between ranks."""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter

from tfdist.launch.flight.findings import Call, Mismatch
from tfdist.launch.flight.log import Record
from tfdist.launch.flight.merge import Group, Member

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

    Of a number that differs, all calls are shown, in the order of how many ranks made them.
    """
    first: dict[int, tuple[object, ...]] = {}
    differing = set()
    for member in group.members.values():
        for record in member.communicator.records:
            if not record.is_message:
                key = _key(record)
                if first.setdefault(record.sequence, key) != key:
                    differing.add(record.sequence)
    return _describe(group, min(differing)) if differing else None


def _describe(group: Group, sequence: int) -> Mismatch:
    found: dict[tuple[object, ...], list[tuple[Member, Record]]] = defaultdict(list)
    for _, member in sorted(group.members.items()):
        for record in member.communicator.records:
            if record.sequence == sequence and not record.is_message:
                found[_key(record)].append((member, record))
    # Sorting is stable: of equally many, the lower ranks are first.
    most_first = sorted(found.values(), key=lambda made: -len(made))
    differs = tuple(
        name
        for name, values in zip(_AGREED.values(), zip(*found, strict=True), strict=True)
        if len(set(values)) > 1
    )
    return Mismatch(
        communicator=group.name,
        number=sequence,
        calls=tuple(
            Call(tuple(member.name for member, _ in made), made[0][1].what) for made in most_first
        ),
        differs=differs,
        time=min(m.time(r.begun_ns) for made in most_first for m, r in made) / 1e9,
    )
