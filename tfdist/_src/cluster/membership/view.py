"""Views, which are the members of one generation, and pure decisions about the next view."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from tfdist._src.cluster.cluster_spec import Topology, Worker
from tfdist._src.cluster.net.framing import WireError

_MAX_LENGTH = 512


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process, so that others on the same machine can see whether it still runs.

    Attributes:
        machine: processes with the same text see one another's process ids.
        pid: its process id.
        started: its start time in the kernel's ticks; distinguishes it from later users of the pid.
        record: the file with its last word; "" if it keeps none.
        witness: the address of its launcher, which reports whether it is dead; "" without one.
    """

    machine: str
    pid: int
    started: int
    record: str = ""
    witness: str = ""


@dataclass(frozen=True)
class Member:
    """A process that belongs to a view, or wants to join.

    Attributes:
        worker: its entry in the cluster.
        incarnation: a random token; a restarted process has another one.
        place: where it runs.
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
        """Returns the rank of a process in this view; None if it is not a member."""
        tokens = self.incarnations
        return tokens.index(incarnation) if incarnation in tokens else None

    def topology(self, rank: int) -> Topology:
        """Returns the view's topology for the member with this rank."""
        workers = tuple(member.worker for member in self.members)
        me = workers[rank]
        return Topology(workers, rank, me.task_type, me.task_index, self.generation)


def encode_member(member: Member) -> dict[str, Any]:
    """Returns a member as JSON."""
    return asdict(member)


def decode_member(data: object) -> Member:
    """Returns a member from JSON.

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
    """Returns a view as JSON."""
    if view is None:
        return None
    return {"generation": view.generation, "members": [encode_member(m) for m in view.members]}


def decode_view(data: object) -> View:
    """Returns a view from JSON.

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
    """Whether a value is a short, printable text: a stranger's must not inject log lines."""
    return type(value) is str and len(value) <= _MAX_LENGTH and value.isprintable()


class State(Enum):
    """A proposer's knowledge of another member."""

    AWAITED = "awaited"
    ANSWERED = "answered"
    DEAD = "dead"
    """Dead for certain, and its last word is known."""
    GONE = "gone"
    """Dead for certain, but its last word is lost."""
    LOST = "lost"
    """Silent for so long that the others no longer wait for it."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for a member that does not answer.

    Attributes:
        refused: seconds for which its address may refuse connections if no process sees it alive.
            (No process listens there while workers connect to one another.)
        silent: seconds for which it may be silent; it may be suspended, or disconnected.
        unseen: seconds for which it may be silent if no process sees it alive; None for no separate
            limit.
    """

    refused: float
    silent: float
    unseen: float | None = None


@dataclass(frozen=True)
class Evidence:
    """The facts known about a member, with times in seconds of any clock.

    Attributes:
        answered: whether it has answered.
        dead: whether it is dead for certain.
        last_word: whether its last word is known.
        refused_since: when its address began to refuse connections; None if it does not.
        silent_since: when its silence began; None if it is not silent.
        alive: whether the last inquiry on its machine has found it alive.
        sought: whether such an inquiry has been attempted.
    """

    answered: bool = False
    dead: bool = False
    last_word: bool = False
    refused_since: float | None = None
    silent_since: float | None = None
    alive: bool = False
    sought: bool = False

    def state(self, now: float, patience: Patience) -> State:
        """Returns the member's state; a proposer waits for it only in `State.AWAITED`.

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
    """Returns the proposer: the member of the lowest rank that is not lost; None if all are.

    Args:
        view: the present view; its members decide on the next one.
        lost: the incarnations of the members that do not answer.
    """
    return next((one for one in view.members if one.incarnation not in lost), None)


def all_accounted_for(states: Iterable[State]) -> bool:
    """Whether there is no member left to wait for."""
    return State.AWAITED not in states


def compose(
    view: View,
    promised: Collection[str],
    joiners: Sequence[Member],
    max_workers: int | None,
) -> View:
    """Returns the view to propose: the continuing members in order, then waiting processes.

    A newcomer replaces a member with the same address if that member does not continue.

    Args:
        view: the present view; its members decide on the next one.
        promised: the incarnations of the members that continue.
        joiners: the processes that wait to be admitted, in order of arrival.
        max_workers: newcomers are admitted only up to this group size; None for no limit.
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
    """Returns the members of a view whose state is among the wanted ones."""
    return [str(m) for m in view.members if states.get(m.incarnation) in wanted]
