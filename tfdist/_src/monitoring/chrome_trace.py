"""Merges the records of all workers into a trace in Chrome's format.

Format: Google, "Trace Event Format" (2016).
"""

from __future__ import annotations

import collections
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import tensorflow as tf
from google.protobuf.message import DecodeError

from tfdist._src.internals.tensorflow import read_threads
from tfdist._src.log import logger


def clock_offsets(records: list[dict[str, Any]]) -> list[tuple[int, int | None]]:
    """Returns each worker's clock minus the chief's clock in nanoseconds, and its uncertainty.

    If a worker and the chief have not compared their clocks, the difference is computed from the
    time of day on their hosts, and the uncertainty is None.

    Args:
        records: each worker's record, by rank; see `Timeline`.
    """
    chief = records[0]
    measured = {0: (0, 0)}
    for communicator in chief["communicators"]:
        if communicator["size"] != len(records):
            continue
        for peer in communicator["peers"]:
            found = peer["clock_offset_ns"], peer["clock_uncertainty_ns"]
            if None not in found and found[1] <= measured.get(peer["rank"], found)[1]:
                measured[peer["rank"]] = found
    steady, unix = chief["clock"]
    return [
        measured.get(rank, (record["clock"][0] - record["clock"][1] - (steady - unix), None))
        for rank, record in enumerate(records)
    ]


Event = dict[str, Any]

# The lanes of a worker, from top to bottom; the lanes of communicators follow "waiting".
_FIRST = ("step", "pipeline", "input", "waiting")
_LAST = ("compression", "optimizer")
_MESSAGES = ("send", "receive")


class Span(NamedTuple):
    """An activity of a worker; its times are nanoseconds of the worker's steady clock."""

    lane: str
    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class WorkerRecord:
    """The records of one worker.

    Attributes:
        rank: its rank.
        worker: its name.
        host: its host's name.
        clock_offset: its steady clock minus the steady clock of rank 0, in nanoseconds.
        clock_uncertainty: the maximum error of the offset, in nanoseconds; None if unknown.
        spans: its spans.
        communicators: the records of its communicators, in the form that the core's `tfd_state`
            returns.
        ops: the operations that TensorFlow's profiler recorded; the lane of an operation is the
            thread that ran the operation.
    """

    rank: int
    worker: str
    host: str
    clock_offset: int = 0
    clock_uncertainty: int | None = 0
    spans: Sequence[Span] = ()
    communicators: Sequence[Mapping[str, Any]] = field(default_factory=list)
    ops: Sequence[Span] = ()


def build(workers: Sequence[WorkerRecord], about: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the trace, as an object that can be written as JSON.

    Args:
        workers: the records, by rank.
        about: additional entries for `otherData` in the file.
    """
    begin = min(_begins(workers), default=0)
    begun = _Begun(workers)
    events: list[Event] = []
    for worker in workers:
        events += _Worker(worker, begin, begun).events()
    clocks = {
        str(worker.rank): {
            "offset_us": worker.clock_offset / 1e3,
            "uncertainty_us": None
            if worker.clock_uncertainty is None
            else worker.clock_uncertainty / 1e3,
        }
        for worker in workers
    }
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**about, "clocks": clocks},
    }


def _begins(workers: Sequence[WorkerRecord]) -> Iterator[int]:
    for worker in workers:
        times = [span.begin for span in [*worker.spans, *worker.ops]]
        times += [r["begun_ns"] for c in worker.communicators for r in c["records"]]
        yield from (time - worker.clock_offset for time in times)


def _thread(op: Span) -> str:
    """The name of the lane that shows the operations of a thread."""
    return f"TensorFlow: {op.lane}"


class _Begun:
    """The time at which each rank began each collective."""

    def __init__(self, workers: Sequence[WorkerRecord]) -> None:
        self._times: dict[Any, dict[int, tuple[int, WorkerRecord]]] = defaultdict(dict)
        for worker in workers:
            for communicator in worker.communicators:
                for record in communicator["records"]:
                    if record["kind"] not in _MESSAGES:
                        time = record["begun_ns"] - worker.clock_offset
                        key = self._key(communicator, record)
                        self._times[key][communicator["rank"]] = time, worker

    def last(self, communicator: Mapping[str, Any], record: Event) -> int:
        """Returns the last rank for which a rank waited in a collective.

        If a host has several ranks, a rank of another host sees only some of them, and these ranks
        may themselves be waiting for other ranks of their host. Therefore, the method returns the
        rank that began the collective last. If the clocks are too inaccurate to identify this rank,
        the method returns the last rank that the waiting rank saw.
        """
        noticed: int = record["last"]
        times = self._times[self._key(communicator, record)]
        if record["kind"] in ("broadcast", *_MESSAGES) or noticed not in times:
            return noticed
        latest = max(times, key=lambda rank: times[rank][0])
        # A rank does not wait for itself. If the waiting rank itself began last, it waited for the
        # rank that it saw last. This rank began earlier, but was delayed.
        if latest == communicator["rank"]:
            return noticed
        (before, one), (after, other) = times[noticed], times[latest]
        if one.clock_uncertainty is None or other.clock_uncertainty is None:
            return noticed
        uncertainty = one.clock_uncertainty + other.clock_uncertainty
        return latest if after - before > uncertainty else noticed

    @staticmethod
    def _key(communicator: Mapping[str, Any], record: Event) -> Any:
        return communicator["name"], tuple(communicator["ranks"]), record["sequence"]


class _Worker:
    """Creates the events of one worker. The trace shows the worker as a process."""

    def __init__(self, worker: WorkerRecord, begin: int, begun: _Begun) -> None:
        self._worker = worker
        self._begin = begin
        self._begun = begun
        used = {span.lane for span in worker.spans}
        names = [c["name"] for c in worker.communicators if c["records"]]
        middle = [*names, *sorted(used - {*_FIRST, *_LAST})]
        threads = dict.fromkeys(_thread(span) for span in worker.ops)
        lanes = [*_FIRST, *middle, *_LAST, *threads]
        self._lanes = {lane: n for n, lane in enumerate(lanes, start=1)}
        # The position of each lane from top to bottom, by the number of the lane.
        self._positions = {n: n for n in self._lanes.values()}

    def events(self) -> list[Event]:
        found = list(self._unnamed())
        self._spread([event for event in found if event["ph"] == "X"])
        return [*self._names(), *found]

    def _unnamed(self) -> Iterator[Event]:
        for span in self._worker.spans:
            yield self._slice(span.lane, span.name, span.begin, span.end)
        for op in self._worker.ops:
            yield self._slice(_thread(op), op.name, op.begin, op.end)
        for communicator in self._worker.communicators:
            for record in communicator["records"]:
                if record["ended_ns"]:
                    yield from self._collective(communicator, record)

    def _names(self) -> Iterator[Event]:
        worker = self._worker
        name = f"rank {worker.rank}: {worker.worker} on {worker.host}"
        yield self._meta("process_name", {"name": name})
        yield self._meta("process_sort_index", {"sort_index": worker.rank})
        for lane, number in self._lanes.items():
            yield self._meta("thread_name", {"name": lane}, number)
            yield self._meta("thread_sort_index", {"sort_index": self._positions[number]}, number)

    def _spread(self, slices: list[Event]) -> None:
        """Moves overlapping slices to additional lanes, because viewers would nest them.

        For example, the slices of several replicas overlap.
        """
        names = {number: lane for lane, number in self._lanes.items()}
        opened: dict[int, dict[int, list[int]]] = {lane: {lane: []} for lane in names}
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            begin, end = round(1e3 * event["ts"]), round(1e3 * (event["ts"] + event["dur"]))
            lanes = opened[event["tid"]]
            for ends in lanes.values():
                while ends and ends[-1] <= begin:
                    ends.pop()
            free = (lane for lane, ends in lanes.items() if not ends or end <= ends[-1])
            lane = next(free, None)
            if lane is None:
                lane = len(self._lanes) + 1
                self._lanes[f"{names[event['tid']]} {len(lanes) + 1}"] = lane
                self._positions[lane] = event["tid"]
                lanes[lane] = []
            lanes[lane].append(end)
            event["tid"] = lane

    def _meta(self, name: str, args: Event, thread: int = 0) -> Event:
        return {"ph": "M", "pid": self._worker.rank, "tid": thread, "name": name, "args": args}

    def _at(self, time: int) -> float:
        """Converts a time to microseconds since the trace began, by the clock of rank 0."""
        return (time - self._worker.clock_offset - self._begin) / 1e3

    def _event(self, kind: str, lane: str, name: str, time: int, **more: Any) -> Event:
        location = {"pid": self._worker.rank, "tid": self._lanes[lane]}
        return {"ph": kind, "cat": lane, "name": name, "ts": self._at(time), **location, **more}

    def _slice(self, lane: str, name: str, begin: int, end: int, **args: Any) -> Event:
        event = self._event("X", lane, name, begin, dur=max(0, end - begin) / 1e3)
        return event | ({"args": args} if args else {})

    def _collective(self, communicator: Mapping[str, Any], record: Event) -> Iterator[Event]:
        lane, ranks = communicator["name"], communicator["ranks"]
        begun, ended = record["begun_ns"], record["ended_ns"]
        arrived = min(max(record["last_arrived_ns"], begun), ended)
        yield self._slice(
            lane,
            f"{record['kind']} {record['name']}".strip(),
            begun,
            ended,
            what=record["what"],
            number=record["sequence"],
            bytes=record["bytes"],
            algorithm=record["algorithm"],
            failed=record["failed"],
        )
        if arrived > begun:
            last = self._begun.last(communicator, record)
            yield self._slice(lane, f"wait for {ranks[last]}", begun, arrived)
        if ended > arrived:
            yield self._slice(lane, "move", arrived, ended)
            yield from self._phases(lane, record, arrived, ended)
        yield from self._arrivals(communicator, record)
        if begun - record["enqueued_ns"] > 1000:
            # Async events ("b" and "e"), because several collectives may wait at the same time.
            number = f"{self._worker.rank} {lane} {record['number']}"
            name = f"queued: {record['kind']} {record['name']}".strip()
            yield self._event("b", lane, name, record["enqueued_ns"], id=number)
            yield self._event("e", lane, name, begun, id=number)
        if record["coding_ns"]:
            coded = min(arrived + record["coding_ns"], ended)
            yield self._slice("compression", f"encode and decode {record['name']}", arrived, coded)
        if record["kind"] in _MESSAGES:
            yield self._arrow(communicator, record)

    def _phases(self, lane: str, record: Event, arrived: int, ended: int) -> Iterator[Event]:
        """Yields the phases of a hierarchical collective."""
        if record["algorithm"] != "hierarchical" or not record["between_ended_ns"]:
            return
        begin = min(max(record["between_begun_ns"], arrived), ended)
        end = min(max(record["between_ended_ns"], begin), ended)
        parts = (
            ("within the host", arrived, begin),
            ("between hosts", begin, end),
            ("within the host", end, ended),
        )
        for name, first, last in parts:
            if last > first:
                yield self._slice(lane, name, first, last)

    def _arrivals(self, communicator: Mapping[str, Any], record: Event) -> Iterator[Event]:
        """Yields an event for each time at which another host joined a collective."""
        own = communicator["hosts"][communicator["rank"]]
        for host, time in enumerate(record["arrivals_ns"]):
            if host != own and time:
                first = communicator["ranks"][communicator["hosts"].index(host)]
                name = f"host of {first} arrived"
                yield self._event("i", communicator["name"], name, time, s="t")

    def _arrow(self, communicator: Mapping[str, Any], record: Event) -> Event:
        """Returns the beginning or the end of the arrow from a send to the matching receive."""
        sends = record["kind"] == "send"
        ends = (communicator["rank"], record["peer"])
        sender, receiver = ends if sends else ends[::-1]
        ranks = communicator["ranks"]
        arrow = {
            "id": f"{communicator['name']} {ranks[sender]} {ranks[receiver]} {record['sequence']}",
            **({} if sends else {"bp": "e"}),
        }
        kind, time = ("s", record["begun_ns"]) if sends else ("f", record["ended_ns"])
        return self._event(kind, communicator["name"], record["name"], time, **arrow) | {
            "cat": "message"
        }


class OpProfile:
    """Runs `tf.profiler` from `start` to `stop`. A process can run only one profiler at a time.

    If the profiler fails, for example because
    `keras.callbacks.TensorBoard(profile_batch=...)` is using it, a warning gives the reason, and no
    operations are recorded.
    """

    _running: ClassVar[OpProfile | None] = None

    def __init__(self) -> None:
        self._folder = ""
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        """Starts the profiler; stops it first if a failed training run has left it running."""
        left = OpProfile._running
        if left is not None:
            OpProfile._running = None
            with left._undo, contextlib.suppress(tf.errors.OpError):
                tf.profiler.experimental.stop(save=False)
        # Tracing Python functions would be expensive, and would not show a graph's operations.
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
        )
        try:
            with contextlib.ExitStack() as undo:
                folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-profile-"))
                tf.profiler.experimental.start(folder, options)
                self._folder, self._undo = folder, undo.pop_all()
                OpProfile._running = self
        except (tf.errors.OpError, OSError) as error:
            _complain(error)

    def stop(self, ahead: int) -> list[Span]:
        """Stops the profiler.

        Args:
            ahead: the time of the clock that the spans use, minus the time since 1970, in
                nanoseconds.

        Returns:
            The operations that ran, with a lane for each thread, and for each stream of a GPU.
        """
        if OpProfile._running is not self:
            return []
        OpProfile._running = None
        folder = Path(self._folder)
        try:
            with self._undo:
                tf.profiler.experimental.stop()
                profiles = [path.read_bytes() for path in folder.rglob("*.xplane.pb")]
            threads = [thread for profile in profiles for thread in read_threads(profile)]
        except (tf.errors.OpError, OSError, DecodeError) as error:
            _complain(error)
            return []
        threads.sort(key=lambda thread: thread[1][0].begin)
        spans, numbers = [], collections.Counter[str]()
        for pool, ops in threads:
            numbers[pool] += 1
            lane = f"{pool} {numbers[pool]}"
            spans += [Span(lane, op.name, op.begin + ahead, op.end + ahead) for op in ops]
        return spans


def _complain(error: Exception) -> None:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    logger.warning(
        "TensorFlow's operations are missing from this worker's timeline, as its profiler "
        f"failed: {reason}. If TensorBoard uses it, pass profile_batch=0 there."
    )
