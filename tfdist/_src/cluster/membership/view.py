"""A view: the members of one generation of the group, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tfdist._src.cluster.net.framing import WireError
from tfdist._src.cluster.spec.topology import Topology, Worker

_MAX_LENGTH = 512


@dataclass(frozen=True)
class Place:
    """Where a process runs, so that others of the same machine can see whether it still does.

    Attributes:
        machine: processes with the same text see one another's process ids.
        pid: its process id.
        started: when it started, in the kernel's ticks; tells it from a later process with its id.
        record: the file with its last word; "" if it keeps none.
        witness: the address of its launcher, which tells others whether it is dead; "" if there is
            none.
    """

    machine: str
    pid: int
    started: int
    record: str = ""
    witness: str = ""


@dataclass(frozen=True)
class Member:
    """A process that belongs to a view, or wants to.

    Attributes:
        worker: its entry in the cluster.
        incarnation: a random token; a restarted process has another one.
        place: where it runs.
    """

    worker: Worker
    incarnation: str
    place: Place

    def __str__(self) -> str:
        return str(self.worker)


@dataclass(frozen=True)
class View:
    """The members of a generation, in rank order.

    Attributes:
        generation: its number.
        members: never empty.
    """

    generation: int
    members: tuple[Member, ...]

    @property
    def incarnations(self) -> tuple[str, ...]:
        """The tokens of the members, in rank order."""
        return tuple(member.incarnation for member in self.members)

    def rank(self, incarnation: str) -> int | None:
        """The rank of a process in this view; None if it does not belong to it."""
        tokens = self.incarnations
        return tokens.index(incarnation) if incarnation in tokens else None

    def topology(self, rank: int) -> Topology:
        """The view as its member with this rank sees it."""
        workers = tuple(member.worker for member in self.members)
        me = workers[rank]
        return Topology(workers, rank, me.task_type, me.task_index, self.generation)


def encode_member(member: Member) -> dict[str, Any]:
    """A member as JSON."""
    return asdict(member)


def decode_member(data: object) -> Member:
    """A member from JSON.

    Raises:
        WireError: it is none.
    """
    try:
        assert isinstance(data, Mapping)
        member = Member(Worker(**data["worker"]), str(data["incarnation"]), Place(**data["place"]))
    except (AssertionError, KeyError, TypeError):
        raise WireError("it sent no member") from None
    worker, place = member.worker, member.place
    texts = [worker.task_type, worker.address, member.incarnation]
    texts += [place.machine, place.record, place.witness]
    numbers = (worker.task_index, place.pid, place.started)
    if not all(map(_is_text, texts)) or not all(type(n) is int and n >= 0 for n in numbers):
        raise WireError("it sent a malformed member")
    return member


def encode_view(view: View | None) -> dict[str, Any] | None:
    """A view as JSON."""
    if view is None:
        return None
    return {"generation": view.generation, "members": [encode_member(m) for m in view.members]}


def decode_view(data: object) -> View:
    """A view from JSON.

    Raises:
        WireError: it is none.
    """
    if not isinstance(data, Mapping):
        raise WireError("it sent no view")
    generation, members = data.get("generation"), data.get("members")
    if type(generation) is not int or not isinstance(members, Sequence) or not members:
        raise WireError("it sent a malformed view")
    view = View(generation, tuple(decode_member(one) for one in members))
    if len(set(view.incarnations)) != len(view.members):
        raise WireError("it sent a view with a member that is there twice")
    return view


def _is_text(value: object) -> bool:
    """A stranger's text must not inject lines into the log."""
    return type(value) is str and len(value) <= _MAX_LENGTH and value.isprintable()
