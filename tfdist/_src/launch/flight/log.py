"""Reads a worker's flight log."""

import functools
import json
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints

FORMAT = 1
MESSAGES = ("send", "receive")
_STEPS = "step_communication"

T = TypeVar("T", bound=NamedTuple)


class Record(NamedTuple):
    """A collective or a message, as recorded on one rank.

    Times are nanoseconds of the steady clock of the rank's host; 0 for events that did not happen.

    Attributes:
        number: its position among all operations of this communicator on this rank, from 1.
        sequence: the number of a collective, the same on all ranks; or the number of a message
            between this pair of ranks in this direction.
        kind: "all_reduce", "send" and so on.
        what: a description for people.
        peer: the other rank of a message; else -1.
        last_arrived_ns: the time at which this rank noticed the arrival of `last`.
        last: the last rank that this rank waited for and noticed arriving; -1 for none.
        failed: whether it ended with an error.

    All ranks must agree on `kind` and on the attributes from `name` to `failures`.
    """

    number: int
    sequence: int
    kind: str
    what: str
    name: str
    type: str
    shapes: str
    tensors: int
    elements: int
    op: str
    root: int
    codec: str
    forced_algorithm: str
    failures: int
    peer: int
    begun_ns: int
    last_arrived_ns: int
    ended_ns: int
    last: int
    failed: bool

    @property
    def is_message(self) -> bool:
        """Whether it is a message between two ranks."""
        return self.kind in MESSAGES

    @property
    def is_open(self) -> bool:
        """Whether it has not succeeded: the rank is still in it, or it failed."""
        return self.failed or not self.ended_ns


class Peer(NamedTuple):
    """A rank's latest information about another rank of its group.

    Attributes:
        rank: the other rank.
        heard_ns: the time of the information, on this rank's clock; 0 for never.
        sequence: the last collective of the group that the other rank had joined.
        inside: the operation that the other rank was in, if any.
        left: whether the other rank has closed the communicator.
        lost: whether the other rank counts as lost.
        clock_offset_ns: the other rank's steady clock minus this rank's; None if not measured.
        clock_uncertainty_ns: the maximum error of `clock_offset_ns`.
    """

    rank: int
    heard_ns: int
    sequence: int
    inside: str | None
    left: bool
    lost: bool
    clock_offset_ns: int | None
    clock_uncertainty_ns: int | None


class Connection(NamedTuple):
    """The kernel's counts for the connection to a rank of another host.

    Attributes:
        rank: the other rank.
        pending_bytes: the number of bytes written to the connection and not acknowledged.
        bytes_per_second: the recent rate of acknowledgment; 0 if unknown.
        silent_ms: milliseconds since the last acknowledgment.
    """

    rank: int
    pending_bytes: int
    bytes_per_second: int
    silent_ms: int


class Reason(NamedTuple):
    """The reason for a log: "error", "stall", "waited" or "signal", and the message."""

    steady_ns: int
    kind: str
    communicator: str
    message: str


class LoggedTransfer(NamedTuple):
    """A value that a training step communicates, as in `Transfer`.

    Attributes:
        kind: "reduce" or "gather"; "send" between stages of a pipeline.
        operation: the type of the operation that needs the value.
        bytes: the size of the whole value; None if a dimension is unknown.
        shape: the shape of the whole value, with None for unknown dimensions.
        where: a line of user code, or the name of the operation.
        reason: the reason for gathering it; "" for a reduction.
    """

    kind: str
    operation: str
    bytes: int | None
    shape: list[int | None]
    where: str
    reason: str


@dataclass(frozen=True)
class Step:
    """The training step that the worker last traced for a model.

    Attributes:
        model: the model's name.
        program: a hash, equal for equal programs.
        rows: the number of rows of the whole batch; None if unknown.
        reduced_bytes: the total known size of reduced values.
        gathered_bytes: the total known size of gathered values.
        sent_bytes: the total known size of values that stages send each other.
        unknown: the number of values of unknown size.
        transfers: the largest values.
        more: the number of other values.
    """

    model: str
    program: str
    rows: int | None
    reduced_bytes: int
    gathered_bytes: int
    sent_bytes: int
    unknown: int
    transfers: tuple[LoggedTransfer, ...]
    more: int


@dataclass(frozen=True)
class Aborted:
    """Why a communicator was aborted.

    Attributes:
        message: a sentence, the same on all ranks.
        event: "lost", "silent", "left", "failed" or "other"; "" if unknown.
        worker: the worker to which the event happened; "" for none.
    """

    message: str
    event: str = ""
    worker: str = ""


@dataclass(frozen=True)
class Communicator:
    """One communicator of the worker.

    Attributes:
        name: its name.
        rank: this worker's rank in its group.
        ranks: the names of the group's workers.
        hosts: for each rank, an index of its host.
        aborted: why it was aborted; None if it was not.
        peers: this rank's information about the other ranks.
        connections: the connections to ranks of other hosts.
        records: the last collectives and messages, oldest first.
    """

    name: str
    rank: int
    ranks: tuple[str, ...]
    hosts: tuple[int, ...]
    aborted: Aborted | None
    peers: tuple[Peer, ...]
    connections: tuple[Connection, ...]
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Log:
    """The flight log of one worker.

    Attributes:
        rank: the worker's rank in the job.
        size: the number of workers of the job.
        generation: the number of membership changes so far.
        worker: its name in messages.
        host: its host's name.
        pid: its process ID.
        program: its script.
        steady_ns: the time of writing, on the host's steady clock.
        unix_ns: the same moment in Unix time.
        reasons: the reasons for the log, oldest first.
        steps: the training steps begun; 0 if unknown.
        input_since_ns: the start of the current wait for the next batch; 0 for none.
        communicators: the open communicators; last, the session with its exchanges.
        stacks: Python's stacks, as printed by faulthandler; "" if there are none.
        training_steps: the training steps of the most recently trained models.
    """

    rank: int
    size: int
    generation: int
    worker: str
    host: str
    pid: int
    program: str
    steady_ns: int
    unix_ns: int
    reasons: tuple[Reason, ...]
    steps: int
    input_since_ns: int
    communicators: tuple[Communicator, ...]
    stacks: str
    training_steps: tuple[Step, ...]

    @property
    def input_seconds(self) -> float | None:
        """The time the worker had waited for its next batch; None if it did not wait."""
        records = [record for one in self.communicators for record in one.records]
        # If an operation is open, the worker waits in a collective of its input pipeline instead.
        if not self.input_since_ns or not all(record.ended_ns for record in records):
            return None
        return (self.steady_ns - self.input_since_ns) / 1e9


def parse(content: bytes) -> Log:
    """Reads a flight log. Unknown keys are ignored.

    Args:
        content: the file's content, JSON.

    Raises:
        ValueError: the content is damaged, of another format, or no flight log; the message is one
            line.
    """
    try:
        raw = json.loads(content)
        written = raw["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("it is damaged, or no flight log") from error
    if written != FORMAT:
        raise ValueError(f"it has format {written!r}, and this version of tfdist reads {FORMAT}")
    try:
        return _log(raw)
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is damaged: {error}") from error


def _log(raw: Any) -> Log:
    clock = _checked(raw, "clock", dict)
    if not 0 <= _checked(clock, "unix_ns", int) < 1 << 63:
        raise TypeError(f"unix_ns is {clock['unix_ns']}")
    return Log(
        **{key: _checked(raw, key, int) for key in ("rank", "size", "pid", "steps")},
        generation=_checked({"generation": 0, **raw}, "generation", int),
        **{key: _checked(raw, key, str) for key in ("worker", "host", "program", "stacks")},
        **{key: _checked(clock, key, int) for key in ("steady_ns", "unix_ns")},
        # Logs of earlier versions lack this key.
        input_since_ns=_checked({"input_since_ns": 0, **raw}, "input_since_ns", int),
        reasons=_rows(raw, "reasons", Reason),
        communicators=tuple(map(_communicator, _groups(raw))),
        # Logs of earlier versions lack this key.
        training_steps=tuple(map(_step, _checked({_STEPS: [], **raw}, _STEPS, list))),
    )


def _step(raw: Any) -> Step:
    read = Step(
        **{key: _checked(raw, key, str) for key in ("model", "program")},
        **{key: _checked(raw, key, int) for key in ("reduced_bytes", "gathered_bytes")},
        **{key: _checked(raw, key, int) for key in ("unknown", "more")},
        # Logs of earlier versions lack this key.
        sent_bytes=_checked({"sent_bytes": 0, **raw}, "sent_bytes", int),
        rows=_checked(raw, "rows", (int, type(None))),
        transfers=_rows(raw, "transfers", LoggedTransfer),
    )
    sizes = [size for one in read.transfers for size in one.shape]
    if not all(isinstance(size, (int, type(None))) for size in sizes):
        raise TypeError(f"a shape in the step of {read.model!r} has a wrong type")
    return read


def _groups(raw: Any) -> list[Any]:
    # The session is logged in the form of a communicator. Logs of earlier versions lack it.
    session = [raw["session"]] if "session" in raw else []
    return [*_checked(raw, "communicators", list), *session]


def _communicator(raw: Any) -> Communicator:
    ranks = tuple(_checked(raw, "ranks", list))
    read = Communicator(
        name=_checked(raw, "name", str),
        rank=_checked(raw, "rank", int),
        ranks=ranks,
        hosts=tuple(_checked(raw, "hosts", list)),
        aborted=_aborted(_checked(raw, "aborted", (dict, str, type(None)))),
        peers=_rows(raw, "peers", Peer),
        # Logs of earlier versions lack this key.
        connections=_rows({"links": [], **raw}, "links", Connection),
        records=_rows(raw, "records", Record),
    )
    others = [*(one.rank for one in read.peers), *(one.rank for one in read.connections)]
    named = {read.rank, *others}
    noted = {rank for record in read.records for rank in (record.peer, record.last)} - {-1}
    if not (
        len(ranks) == len(read.hosts)
        and all(isinstance(name, str) for name in ranks)
        and all(isinstance(host, int) for host in read.hosts)
        and all(0 <= rank < len(ranks) for rank in named | noted)
    ):
        raise TypeError(f"the ranks of communicator {read.name!r} are inconsistent")
    return read


def _aborted(raw: dict[str, Any] | str | None) -> Aborted | None:
    if raw is None:
        return None
    if isinstance(raw, str):  # as in logs of earlier versions
        return Aborted(raw)
    return Aborted(**{key: _checked(raw, key, str) for key in ("message", "event", "worker")})


def _checked(raw: Any, key: str, kind: Any) -> Any:
    value = raw[key]
    if not isinstance(value, kind):
        raise TypeError(f"{key} is {type(value).__name__}")
    return value


def _rows(raw: Any, key: str, kind: type[T]) -> tuple[T, ...]:
    """Converts a list of objects to tuples. Optimized, because a log has thousands of them."""
    keys, types = _columns(kind)
    values = itemgetter(*keys)
    rows = [values(row) for row in _checked(raw, key, list)]
    for row in rows:
        if not all(map(isinstance, row, types)):
            wrong = next(
                k for k, v, t in zip(keys, row, types, strict=True) if not isinstance(v, t)
            )
            raise TypeError(f"{wrong} in {key} has a wrong type")
    return tuple(kind(*row) for row in rows)


@functools.cache
def _columns(kind: type[NamedTuple]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The keys and types of a row. The attribute of the key `in` is `inside`; `in` is a keyword."""
    hints = get_type_hints(kind)
    types = (list if get_origin(hint) is list else hint for hint in hints.values())
    return tuple("in" if name == "inside" else name for name in hints), tuple(types)
