"""Who waits for whom when the logs end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tfdist._src.launch.flight.clocks import doubt_ns
from tfdist._src.launch.flight.log import Record
from tfdist._src.launch.flight.merge import Group, Member

# What takes no longer may be in progress, unless it has failed.
_LONG_NS = 1_000_000_000
_OTHER_SIDE = {"send": "receive", "receive": "send"}


@dataclass(frozen=True)
class Wait:
    """Members that are in one operation, or whose operation failed.

    Attributes:
        group: theirs.
        record: of the one that began first.
        waiting: the members.
        absent: the ranks that had not joined, and for how many nanoseconds after `since` the logs
            show that.
        late: those of them that joined after the others had given up.
        unclear: ranks that may have joined or not: their logs do not cover it.
        since: when the first member began, in shared time.
        until: when the last one failed, or its log was written.
        has_failed: whether it failed on one of them.
    """

    group: Group
    record: Record
    waiting: tuple[Member, ...]
    absent: dict[int, int]
    late: frozenset[int]
    unclear: tuple[int, ...]
    since: int
    until: int
    has_failed: bool


def find_waits(group: Group) -> Iterator[Wait]:
    """Finds the operations of a group in which members wait for long, or that failed."""
    inside: dict[int, list[tuple[Member, Record]]] = defaultdict(list)
    for member in group.members.values():
        record = member.current
        if record is not None and record.is_message:
            yield from _message(group, member, record)
        elif record is not None:
            inside[record.sequence].append((member, record))
    for sequence in sorted(inside):
        yield from _collective(group, inside[sequence])


def _collective(group: Group, inside: list[tuple[Member, Record]]) -> Iterator[Wait]:
    late = _late(inside)
    inside = [pair for pair in inside if pair[0].communicator.rank not in late]
    first, record = min(inside, key=lambda pair: pair[0].time(pair[1].begun_ns))
    since = first.time(record.begun_ns)
    until = max(member.until(own) for member, own in inside)
    has_failed = any(own.failed for _, own in inside)
    absent = dict.fromkeys(late, until - since)
    unclear = []
    for rank in set(range(len(group.ranks))) - late:
        joined = group.joined(rank)
        if joined is not None and joined >= record.sequence:
            continue
        if group.log(rank) is None:
            absent[rank] = until - since
            continue
        surely, seen = _seen_outside(group, rank, first)
        if surely - since < (1 if has_failed else _LONG_NS):
            unclear.append(rank)
        else:
            absent[rank] = min(until, seen) - since
    if record.kind == "broadcast" and record.root in absent:
        absent = {record.root: absent[record.root]}
    if has_failed or until - since >= _LONG_NS:
        members = tuple(member for member, _ in inside)
        yield Wait(group, record, members, absent, late, tuple(unclear), since, until, has_failed)


def _late(inside: list[tuple[Member, Record]]) -> frozenset[int]:
    """The ranks that began a collective after it had failed elsewhere."""
    failed = [(member, record) for member, record in inside if record.failed]
    if not failed:
        return frozenset()
    first, end = min(failed, key=lambda pair: pair[0].time(pair[1].ended_ns))
    return frozenset(
        member.communicator.rank
        for member, record in inside
        if member.time(record.begun_ns) - doubt_ns(member.clock, first.clock)
        > first.time(end.ended_ns)
    )


def _seen_outside(group: Group, rank: int, first: Member) -> tuple[int, int]:
    """Until when a rank is known not to have joined what `first` began: surely, and probably.

    The clocks of the two may differ. Zeros if it is not known.
    """
    seen = [(by.time(peer.heard_ns), by.clock) for by, peer in group.heard[rank] if peer.heard_ns]
    if rank in group.outside:
        seen.append((group.outside[rank].written, group.outside[rank].clock))
    elif group.members[rank].joined is not None:
        seen.append((group.members[rank].written, group.members[rank].clock))
    return max(((at - doubt_ns(clock, first.clock), at) for at, clock in seen), default=(0, 0))


def _message(group: Group, member: Member, record: Record) -> Iterator[Wait]:
    since, until = member.time(record.begun_ns), member.until(record)
    if not record.failed and until - since < _LONG_NS:
        return
    absent: dict[int, int] = {}
    unclear: tuple[int, ...] = ()
    other = group.members.get(record.peer) or group.outside.get(record.peer)
    if other is None:
        absent = {record.peer: until - since}
    else:
        records = other.communicator.records if isinstance(other, Member) else ()
        begun = [
            own.sequence
            for own in records
            if own.kind == _OTHER_SIDE[record.kind] and own.peer == member.communicator.rank
        ]
        is_wrapped = bool(records) and records[0].number > 1
        surely = other.written - doubt_ns(other.clock, member.clock)
        if max(begun, default=0) >= record.sequence:
            pass
        elif (is_wrapped and not begun) or surely - since < (1 if record.failed else _LONG_NS):
            unclear = (record.peer,)
        else:
            absent = {record.peer: min(until, other.written) - since}
    yield Wait(group, record, (member,), absent, frozenset(), unclear, since, until, record.failed)
