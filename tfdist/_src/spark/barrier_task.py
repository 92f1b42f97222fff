"""A task of the barrier stage: runs a worker in its own process and monitors it."""

import collections
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from pyspark import BarrierTaskContext, SparkFiles

from tfdist._src.launch.job.log_routing import LineAssembler
from tfdist._src.launch.job.ports import Reservation
from tfdist._src.launch.job.resources import VISIBLE, available_cores, thread_settings
from tfdist._src.launch.job.worker import Watchdog, WorkerPlan, WorkerProcess
from tfdist._src.options import InternalVariable, Variable
from tfdist._src.spark.dataset_shard import Lengths, description, merge, write_rows
from tfdist._src.spark.driver_log import DriverLogClient
from tfdist._src.spark.program import WorkerProgram

SCHEMA = "chunk binary"
_CHUNK_BYTES = 1 << 20
_READ_SIZE = 1 << 16
_TAIL_LINES = 30
_ENDED, _END = "ended with", "(the end of its output)"
# If a process has left the worker's process group, it may keep the pipe of the output open forever.
_LAST_OUTPUT_SECONDS = 2.0


@dataclass(frozen=True)
class BarrierTask:
    """The callable that Spark runs in each task, with the rows of its partition.

    Attributes:
        program: the program that the worker runs.
        secret: the job's secret.
        settings: environment variables.
        use_gpu: whether the worker uses the GPUs of its task.
        log: the host and the port of the driver's log.
        with_rows: whether the worker needs the rows of the partition.
    """

    program: WorkerProgram = field(repr=False)
    secret: str = field(repr=False)
    settings: dict[str, str] = field(repr=False)
    use_gpu: bool
    log: tuple[str, int]
    with_rows: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Runs the worker. On rank 0, yields the function's pickled return value in chunks."""
        context = BarrierTaskContext.get()
        rank = context.partitionId()
        # The files are in the executor's folder. The rows are in an unnamed file, which the system
        # deletes when the process ends.
        with (
            tempfile.TemporaryDirectory(dir=SparkFiles.getRootDirectory()) as name,
            tempfile.TemporaryFile(dir=name) as rows,
            Reservation(1) as reservation,
        ):
            variables = self._variables(context, reservation.ports[0])
            if self.with_rows:
                try:
                    variables[InternalVariable.SPARK_ROWS] = _receive_rows(
                        batches, context, rows.fileno()
                    )
                except ValueError as error:
                    raise ValueError(f"{error}\n{_END}") from error
            folder = Path(name)
            self._run_worker(rank, self.program.command(folder), variables, [rows.fileno()])
            result = self.program.saved_result(folder)
        # Rank 0 yields at least one chunk, even if there is no result. The chunk shows the driver
        # that a worker has run.
        for start in range(0, max(1, len(result)) if rank == 0 else 0, _CHUNK_BYTES):
            chunk = pa.array([result[start : start + _CHUNK_BYTES]], pa.binary())
            yield pa.RecordBatch.from_arrays([chunk], ["chunk"])

    def _variables(self, context: BarrierTaskContext, port: int) -> dict[str, str]:
        rank = context.partitionId()
        hosts = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
        addresses = context.allGather(f"{hosts[rank]}:{port}")
        place = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        beside = hosts.count(hosts[rank])
        return {
            **thread_settings(available_cores(), beside, None, os.environ),
            **self.settings,
            Variable.SECRET: self.secret,
            "TF_CONFIG": json.dumps(place),
            # `sys.path` includes entries that Spark has added, such as packages sent along with the
            # job.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            VISIBLE: ",".join(_gpus(context)) if self.use_gpu else "",
        }

    def _run_worker(
        self, rank: int, command: list[str], variables: dict[str, str], inherit: list[int]
    ) -> None:
        """Runs the worker; if it fails, raises an error with its last output."""
        log = DriverLogClient(self.log, self.secret)
        watchdog = Watchdog()  # Ends the worker if Spark kills this process without a warning.
        read, write = os.pipe()
        try:
            plan = WorkerPlan(rank, (sys.executable, "-u", *command), variables)
            try:
                streams = (subprocess.DEVNULL, write, write)
                worker = WorkerProcess(plan, os.environ, streams, watchdog, inherit)
            finally:
                os.close(write)
            tail = _follow(worker, read, rank, log)
            status = worker.exit_code()
        finally:
            os.close(read)
            watchdog.close()
            log.close()
        if status:
            how = f"exit code {status}" if status > 0 else f"signal {-status}"
            last = f"Its last output:\n{tail}" if tail else "It printed nothing."
            raise RuntimeError(f"worker {rank} {_ENDED} {how}. {last}\n{_END}")


def failure_in(error: str) -> str:
    """Extracts a task's error message from Spark's error; "" for other errors.

    Example:
        >>> failure_in(f"… RuntimeError: worker 1 ended with signal 9. …\\n{_END} …")
        'worker 1 ended with signal 9. …'
    """
    begin = rf"worker \d+ {_ENDED} |column '|the DataFrame "
    found = re.search(rf"(?:{begin}).*?(?=\n{re.escape(_END)})", error, re.DOTALL)
    return found[0] if found else ""


def _receive_rows(
    batches: Iterator[pa.RecordBatch], context: BarrierTaskContext, descriptor: int
) -> str:
    """Writes the rows to a file, and returns a description of the file and of the rows.

    All tasks exchange the schema of their rows and the lengths of the arrays, because a task
    without rows does not know them.
    """
    schema, lengths, problem = "", Lengths(), ""
    try:
        schema, lengths = write_rows(batches, descriptor)
    except ValueError as error:
        # All tasks raise the error together. If one task raised it alone, Spark would end the other
        # tasks while they wait for this task, and could then lose their executors.
        problem = str(error)
    for text in context.allGather(json.dumps([schema, lengths, problem])):
        other, more, theirs = json.loads(text)
        if theirs:
            raise ValueError(theirs)
        schema = schema or other
        merge(lengths, more)
    if not schema:
        raise ValueError("the DataFrame has no rows")
    return description(f"/proc/self/fd/{descriptor}", schema, lengths)


def _follow(worker: WorkerProcess, pipe: int, rank: int, log: DriverLogClient) -> str:
    """Forwards a worker's output until the worker has ended, and returns the last lines."""
    lines = LineAssembler(f"[{rank}] ")
    tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)

    def show(whole: bytes) -> None:
        if whole:
            text = whole.decode(errors="replace")
            tail.extend(text.splitlines())
            print(text, end="", flush=True)  # For the executor's log.
            log.send(whole)

    for data in _output(worker, pipe):
        show(lines.feed(data))
    show(lines.flush())
    return "\n".join(tail)


def _output(worker: WorkerProcess, pipe: int) -> Iterator[bytes]:
    """Yields a worker's output.

    When the worker ends, its child processes are killed, because they could keep the pipe of the
    output open.
    """
    poll = select.poll()
    process = os.pidfd_open(worker.pid)
    try:
        poll.register(pipe, select.POLLIN)
        poll.register(process, select.POLLIN)
        deadline = None
        while ready := poll.poll(None if deadline is None else _milliseconds_until(deadline)):
            if any(descriptor == process for descriptor, _ in ready):
                worker.exit_code()
                poll.unregister(process)
                deadline = time.monotonic() + _LAST_OUTPUT_SECONDS
            if any(descriptor == pipe for descriptor, _ in ready):
                if not (data := os.read(pipe, _READ_SIZE)):
                    break
                yield data
            if deadline is not None and time.monotonic() > deadline:
                break
        while worker.exit_code() is None:  # The worker still runs, but its output is closed.
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    finally:
        os.close(process)


def _milliseconds_until(deadline: float) -> int:
    return max(0, round((deadline - time.monotonic()) * 1000))


def _gpus(context: BarrierTaskContext) -> list[str]:
    """Returns the GPUs of the task.

    Spark's addresses of GPUs are indices into the GPUs that are visible to the executor.
    """
    found = context.resources().get("gpu")
    addresses = list(found.addresses) if found is not None else []
    seen = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    return [seen[int(address)] if seen else address for address in addresses]
