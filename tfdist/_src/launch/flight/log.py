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
    """A collective or a point-to-point message, as one rank recorded it.

    Times are nanoseconds of the steady clock of the rank's host. A time is 0 if the event has not
    happened.

    Attributes:
        number: the position of the operation among all operations of this communicator on this
            rank, starting at 1.
        sequence: for a collective, its number, which is the same on all ranks. For a message, its
            number among all messages between the two ranks in the same direction.
        kind: the kind of operation, such as "all_reduce" or "send".
        what: a description of the operation for people.
        peer: for a message, the other rank; otherwise -1.
        begun_ns: when the operation began on this rank.
        last_arrived_ns: when this rank noticed that the rank `last` had joined the operation.
        ended_ns: when the operation ended on this rank.
        last: the rank for which this rank waited last; -1 if this rank did not wait for any rank.
        failed: whether the operation ended with an error.

    In a collective, `kind` and the attributes from `name` to `failures` must be the same on all
    ranks.
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
        """Whether the operation is a message between two ranks."""
        return self.kind in MESSAGES

    @property
    def is_open(self) -> bool:
        """Whether the operation is still in progress on the rank, or has failed."""
        return self.failed or not self.ended_ns


class Peer(NamedTuple):
    """The last status that a rank has received from another rank of its group.

    Attributes:
        rank: the other rank.
        heard_ns: when this rank received the status, on this rank's clock; 0 if it has not received
            any status.
        sequence: the number of the last collective that the other rank had joined in the group.
        inside: the operation that the other rank was in; None if it was in no operation.
        left: whether the other rank has closed the communicator.
        lost: whether the other rank counts as lost.
        clock_offset_ns: the time on the other rank's steady clock minus the time on this rank's
            steady clock; None if the ranks have not measured it.
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
    """The kernel's counts for the data connections to a rank of another host.

    Attributes:
        rank: the other rank.
        pending_bytes: the number of bytes that were written and have not been acknowledged.
        bytes_per_second: the rate at which bytes were recently acknowledged; 0 if unknown.
        silent_ms: the number of milliseconds since the last acknowledgment.
    """

    rank: int
    pending_bytes: int
    bytes_per_second: int
    silent_ms: int


class Reason(NamedTuple):
    """The reason why a worker wrote its log.

    Attributes:
        steady_ns: the time of the reason (see `LogReason`), on the steady clock of the host.
        kind, communicator, message: see `LogReason`.
    """

    steady_ns: int
    kind: str
    communicator: str
    message: str


class LoggedTransfer(NamedTuple):
    """A value that a training step communicates.

    Attributes:
        kind: "reduce" or "gather"; "send" if a pipeline stage sends the value to another stage.
        operation: the type of the TensorFlow operation that needs the value.
        bytes: the size of the whole value in bytes; None if a dimension is unknown.
        shape: the shape of the whole value, with None for unknown dimensions.
        where: the line of user code that needs the value, or else the name of the operation.
        reason: why the value is gathered; "" if it is not gathered.
    """

    kind: str
    operation: str
    bytes: int | None
    shape: list[int | None]
    where: str
    reason: str


@dataclass(frozen=True)
class Step:
    """The training step that the worker has traced most recently for a model.

    Attributes:
        model: the model's name.
        program: a hash of the step's program, which is the same for equal programs.
        rows: the number of rows of the global batch; None if unknown.
        reduced_bytes: the total size of the reduced values, as far as it is known.
        gathered_bytes: the total size of the gathered values, as far as it is known.
        sent_bytes: the total size of the values that pipeline stages send to each other, as far as
            it is known.
        unknown: the number of values of unknown size.
        transfers: the largest values.
        more: the number of values that are not in `transfers`.
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
    """The reason why a communicator was aborted.

    Attributes:
        message: the error message, a sentence that is the same on all ranks.
        event: "lost", "silent", "left", "failed" or "other"; "" if unknown.
        worker: the worker that was lost or silent, has left or has failed; "" if there is none.
    """

    message: str
    event: str = ""
    worker: str = ""


@dataclass(frozen=True)
class Communicator:
    """One communicator in a worker's log.

    Attributes:
        name: the communicator's name.
        rank: this worker's rank in the communicator's group.
        ranks: for each rank of the group, the name of its worker.
        hosts: for each rank of the group, the index of its host.
        aborted: why the communicator was aborted; None if it was not aborted.
        peers: the last status that this rank has received from each of the other ranks.
        connections: the data connections to ranks of other hosts.
        records: the most recent collectives and messages, oldest first.
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
        generation: how often the membership of the job had changed since the workers started.
        worker: the worker's name in messages.
        host: the name of the worker's host.
        pid: the worker's process ID.
        program: the worker's script.
        steady_ns: when the log was written, on the steady clock of the worker's host.
        unix_ns: the same moment in Unix time.
        reasons: the reasons why the log was written, oldest first.
        steps: the number of training steps that the worker had begun; 0 if unknown.
        input_since_ns: when the worker began to wait for its next batch, on the steady clock; 0 if
            it was not waiting for a batch.
        communicators: the open communicators. The last entry can be the session: the exchanges of
            all workers over their control connections, in the form of a communicator.
        stacks: the stacks of the Python threads, as printed by faulthandler; "" if there are none.
        training_steps: for the models that were traced most recently, their training steps.
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
        """How long the worker had waited for its next batch; None if it was not waiting for one."""
        records = [record for one in self.communicators for record in one.records]
        # If an operation is in progress during the wait, it is an operation of the input pipeline.
        # Then the worker waits for other workers, not for its own input.
        if not self.input_since_ns or not all(record.ended_ns for record in records):
            return None
        return (self.steady_ns - self.input_since_ns) / 1e9


def parse(content: bytes) -> Log:
    """Reads a flight log. Keys that this version of tfdist does not know are ignored.

    Args:
        content: the content of the file, in JSON.

    Raises:
        ValueError: the content is damaged, has another format, or is not a flight log. The message
            is a single line.
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
        # Logs of earlier versions do not have this key.
        input_since_ns=_checked({"input_since_ns": 0, **raw}, "input_since_ns", int),
        reasons=_rows(raw, "reasons", Reason),
        communicators=tuple(map(_communicator, _groups(raw))),
        # Logs of earlier versions do not have this key.
        training_steps=tuple(map(_step, _checked({_STEPS: [], **raw}, _STEPS, list))),
    )


def _step(raw: Any) -> Step:
    read = Step(
        **{key: _checked(raw, key, str) for key in ("model", "program")},
        **{key: _checked(raw, key, int) for key in ("reduced_bytes", "gathered_bytes")},
        **{key: _checked(raw, key, int) for key in ("unknown", "more")},
        # Logs of earlier versions do not have this key.
        sent_bytes=_checked({"sent_bytes": 0, **raw}, "sent_bytes", int),
        rows=_checked(raw, "rows", (int, type(None))),
        transfers=_rows(raw, "transfers", LoggedTransfer),
    )
    sizes = [size for one in read.transfers for size in one.shape]
    if not all(isinstance(size, (int, type(None))) for size in sizes):
        raise TypeError(f"a shape in the step of {read.model!r} has a wrong type")
    return read


def _groups(raw: Any) -> list[Any]:
    # The session is logged in the form of a communicator. Earlier versions did not log it.
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
        # Logs of earlier versions do not have this key.
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
    if isinstance(raw, str):  # In logs of earlier versions, `aborted` is only the message.
        return Aborted(raw)
    return Aborted(**{key: _checked(raw, key, str) for key in ("message", "event", "worker")})


def _checked(raw: Any, key: str, kind: Any) -> Any:
    value = raw[key]
    if not isinstance(value, kind):
        raise TypeError(f"{key} is {type(value).__name__}")
    return value


def _rows(raw: Any, key: str, kind: type[T]) -> tuple[T, ...]:
    """Converts the list of JSON objects at `key` to tuples of the type `kind`.

    This function is optimized for speed, because a log contains thousands of such objects.
    """
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
    """Returns the JSON keys and the types of the attributes of `kind`.

    Each key is the name of its attribute, except for `inside`. Its key is `in`, which cannot be the
    name of an attribute because it is a keyword of Python.
    """
    hints = get_type_hints(kind)
    types = (list if get_origin(hint) is list else hint for hint in hints.values())
    return tuple("in" if name == "inside" else name for name in hints), tuple(types)
