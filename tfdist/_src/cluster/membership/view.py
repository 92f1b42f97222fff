"""Views, which list the members of one generation, and functions that compute the next view.

The functions have no side effects.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist._src.cluster.net.framing import WireError

_MAX_LENGTH = 512


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process, so that other processes on the machine can see if it still runs.

    Attributes:
        machine: the name of the machine. Two processes with the same name can see each other's
            process ids.
        pid: the process id.
        started: the start time of the process in clock ticks since boot. It distinguishes the
            process from a later process with the same id. 0 if it is unknown.
        record: the path of the record of the process; "" if it keeps no record.
        witness: the address of the launcher, which reports whether the process is dead; "" without
            a launcher.
    """

    machine: str
    pid: int
    started: int
    record: str = ""
    witness: str = ""


@dataclass(frozen=True)
class Member:
    """A process that belongs to a view, or that wants to join a job.

    Attributes:
        worker: the entry of the process in the cluster.
        incarnation: a random token that identifies the process. If a worker is restarted, the new
            process has a different token.
        place: the identity of the process on its machine.
    """

    worker: Worker
    incarnation: str
    place: ProcessIdentity

    def __str__(self) -> str:
        return str(self.worker)


@dataclass(frozen=True)
class View:
    """The members of a generation, in rank order.

    Attributes:
        generation: the number of the generation.
        members: the members; there is at least one.
    """

    generation: int
    members: tuple[Member, ...]

    @property
    def incarnations(self) -> tuple[str, ...]:
        """The incarnations of the members, in rank order."""
        return tuple(member.incarnation for member in self.members)

    def rank(self, incarnation: str) -> int | None:
        """Returns the rank of a process in this view; None if the process is not a member."""
        tokens = self.incarnations
        return tokens.index(incarnation) if incarnation in tokens else None

    def topology(self, rank: int) -> Topology:
        """Converts the view to the topology of the member with the given rank."""
        workers = tuple(member.worker for member in self.members)
        me = workers[rank]
        return Topology(workers, rank, me.task_type, me.task_index, self.generation)


def encode_member(member: Member) -> dict[str, Any]:
    """Converts a member to an object that can be serialized as JSON."""
    return asdict(member)


def decode_member(data: object) -> Member:
    """Converts the result of `encode_member` back to a member.

    Raises:
        WireError: `data` is not a member.
    """
    try:
        assert isinstance(data, Mapping)
        member = Member(
            Worker(**data["worker"]), str(data["incarnation"]), ProcessIdentity(**data["place"])
        )
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
    """Converts a view to an object that can be serialized as JSON."""
    if view is None:
        return None
    return {"generation": view.generation, "members": [encode_member(m) for m in view.members]}


def decode_view(data: object) -> View:
    """Converts the result of `encode_view` back to a view.

    Raises:
        WireError: `data` is not a view.
    """
    if not isinstance(data, Mapping):
        raise WireError("it sent no view")
    generation, members = data.get("generation"), data.get("members")
    if type(generation) is not int or not isinstance(members, Sequence) or not members:
        raise WireError("it sent a malformed view")
    view = View(generation, tuple(decode_member(one) for one in members))
    if len(set(view.incarnations)) != len(view.members):
        raise WireError("it sent a view that lists a member twice")
    return view


def _is_text(value: object) -> bool:
    """Whether a value that a peer has sent is a short, printable text, which is safe to log."""
    return type(value) is str and len(value) <= _MAX_LENGTH and value.isprintable()


class State(Enum):
    """What a proposer knows about another member."""

    AWAITED = "awaited"
    ANSWERED = "answered"
    DEAD = "dead"
    """The process has ended, and its last word is known."""
    GONE = "gone"
    """The process has ended, but its last word is lost."""
    LOST = "lost"
    """Silent for so long that the others no longer wait for it."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for a member that does not answer, before it counts as lost.

    Attributes:
        refused: seconds for which the member's address may refuse connections, if no process sees
            the member alive. A live member refuses connections while it opens the connections of
            a new group.
        silent: seconds for which the member may be silent in any case. It may be suspended or
            disconnected.
        unseen: seconds for which the member may be silent if no process sees it alive. None if
            there is no such limit.
    """

    refused: float
    silent: float
    unseen: float | None = None


@dataclass(frozen=True)
class Evidence:
    """The facts that are known about a member. All times are in seconds of the same clock.

    Attributes:
        answered: whether the member has answered.
        dead: whether the member is known to be dead.
        last_word: whether the last word of the member is known.
        refused_since: the time since which the member's address has refused connections; None if
            the last attempt was not refused.
        silent_since: the time since which the member has been silent; None if it is not silent.
        alive: whether a process on the member's machine has seen it alive at the last check.
        sought: whether there was such a check.
    """

    answered: bool = False
    dead: bool = False
    last_word: bool = False
    refused_since: float | None = None
    silent_since: float | None = None
    alive: bool = False
    sought: bool = False

    def state(self, now: float, patience: Patience) -> State:
        """Returns the member's state. A proposer waits for the member only in `State.AWAITED`.

        Example:
            >>> patience = Patience(refused=1.0, silent=60.0)
            >>> Evidence(refused_since=10.0, silent_since=9.0).state(10.5, patience)
            <State.AWAITED: 'awaited'>
            >>> Evidence(refused_since=10.0, silent_since=9.0).state(11.0, patience)
            <State.LOST: 'lost'>
        """
        if self.answered:
            return State.ANSWERED
        if self.dead:
            return State.DEAD if self.last_word else State.GONE
        silence = now - self.silent_since if self.silent_since is not None else 0.0
        if silence >= patience.silent:
            return State.LOST
        unseen = self.sought and patience.unseen is not None and silence >= patience.unseen
        if (unseen or self.is_refused(now, patience)) and not self.alive:
            return State.LOST
        return State.AWAITED

    def is_refused(self, now: float, patience: Patience) -> bool:
        """Whether the member's address has refused connections for too long."""
        return self.refused_since is not None and now - self.refused_since >= patience.refused


def leader(view: View, lost: Collection[str]) -> Member | None:
    """Returns the member that proposes the next view: the lowest rank that is not lost.

    Args:
        view: the current view. Its members decide on the next view.
        lost: the incarnations of the members that cannot lead, for example because they do not
            answer.

    Returns:
        The member; None if all members are lost.
    """
    return next((one for one in view.members if one.incarnation not in lost), None)


def all_accounted_for(states: Iterable[State]) -> bool:
    """Whether no member is in `State.AWAITED`, so that the proposer need not wait any longer."""
    return State.AWAITED not in states


def compose(
    view: View,
    promised: Collection[str],
    joiners: Sequence[Member],
    max_workers: int | None,
) -> View:
    """Returns the view to propose: first the members that continue, then the joining processes.

    A joining process is admitted only if no member that continues has the same address.

    Args:
        view: the current view. Its members decide on the next view.
        promised: the incarnations of the members that continue.
        joiners: the processes that wait to be admitted, in order of arrival.
        max_workers: the maximum size up to which newcomers are admitted; None for no limit.
    """
    members = [one for one in view.members if one.incarnation in promised]
    taken = {one.worker.address for one in members}
    for joiner in joiners:
        if max_workers is not None and len(members) >= max_workers:
            break
        if joiner.worker.address not in taken and joiner.incarnation not in view.incarnations:
            members.append(joiner)
            taken.add(joiner.worker.address)
    return View(view.generation + 1, tuple(members))


def names(view: View, states: Mapping[str, State], wanted: Collection[State]) -> list[str]:
    """Returns the names of the members of a view that are in one of the wanted states."""
    return [str(m) for m in view.members if states.get(m.incarnation) in wanted]
