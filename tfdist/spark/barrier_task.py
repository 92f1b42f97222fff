"""One task of the barrier stage: it runs a worker in a process of its own, and follows it."""

from __future__ import annotations

import collections
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark import BarrierTaskContext

from tfdist.cluster.auth.hmac_challenge import VARIABLE as SECRET
from tfdist.launch.job.gpus import VISIBLE
from tfdist.launch.job.line_buffer import LineAssembler
from tfdist.launch.job.plan import WorkerPlan
from tfdist.launch.job.ports import Reservation
from tfdist.launch.job.watchdog import Watchdog
from tfdist.launch.job.worker import WorkerProcess
from tfdist.spark.dataset_shard import ROWS, write_rows
from tfdist.spark.driver_log import DriverLogClient
from tfdist.spark.program import Program

SCHEMA = "chunk binary"
_CHUNK_BYTES = 1 << 20
_READ_SIZE = 1 << 16
_TAIL_LINES = 30
# A process that has left the group of a worker may hold its output for ever.
_LAST_OUTPUT_MS = 1000


@dataclass(frozen=True)
class BarrierTask:
    """What Spark calls in each task, with the rows of its partition.

    Attributes:
        program: what the worker runs.
        secret: the job's.
        settings: environment variables.
        use_gpu: whether the worker uses the GPUs of its task.
        log: host and port of the driver's log.
        schema: Spark's schema of the rows, as JSON; None if the rows are not for the worker.
    """

    program: Program
    secret: str
    settings: dict[str, str]
    use_gpu: bool
    log: tuple[str, int]
    schema: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Runs the worker, and yields what the function has returned, on rank 0 only."""
        context = BarrierTaskContext.get()
        rank = context.partitionId()
        with tempfile.TemporaryDirectory(prefix="tfdist-") as name, Reservation(1) as reservation:
            folder = Path(name)
            rows = folder / "rows.arrow"
            if self.schema is not None:
                write_rows(batches, self.schema, rows)
            host = context.getTaskInfos()[rank].address.rpartition(":")[0]
            addresses = context.allGather(f"{host}:{reservation.ports[0]}")
            place = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            variables = {
                **self.settings,
                SECRET: self.secret,
                "TF_CONFIG": json.dumps(place),
                # What Spark has put on the path, such as packages sent along with the job.
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                VISIBLE: ",".join(_gpus(context)) if self.use_gpu else "",
                **({ROWS: str(rows)} if self.schema is not None else {}),
            }
            self._run_worker(rank, self.program.command(folder), variables)
            result = self.program.saved_result(folder) if rank == 0 else b""
        for start in range(0, len(result), _CHUNK_BYTES):
            chunk = pa.array([result[start : start + _CHUNK_BYTES]], pa.binary())
            yield pa.RecordBatch.from_arrays([chunk], ["chunk"])

    def _run_worker(self, rank: int, command: list[str], variables: dict[str, str]) -> None:
        """Raises an error with what the worker has printed last, if it fails."""
        log = DriverLogClient(self.log, self.secret)
        watchdog = Watchdog()  # Spark kills a task's Python process without a warning.
        read, write = os.pipe()
        try:
            plan = WorkerPlan(rank, (sys.executable, "-u", *command), variables)
            try:
                streams = (subprocess.DEVNULL, write, write)
                worker = WorkerProcess(plan, os.environ, streams, watchdog)
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
            raise RuntimeError(f"worker {rank} ended with {how}. It printed last:\n{tail}")


def _follow(worker: WorkerProcess, pipe: int, rank: int, log: DriverLogClient) -> str:
    """Passes on what a worker prints until it has ended, and returns the last lines."""
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
    """What a worker prints. When it has ended, its children, which hold the pipe, are killed."""
    poll = select.poll()
    process = os.pidfd_open(worker.pid)
    try:
        poll.register(pipe, select.POLLIN)
        poll.register(process, select.POLLIN)
        limit = None
        while ready := poll.poll(limit):
            if any(descriptor == process for descriptor, _ in ready):
                worker.exit_code()
                poll.unregister(process)
                limit = _LAST_OUTPUT_MS
            if any(descriptor == pipe for descriptor, _ in ready):
                if not (data := os.read(pipe, _READ_SIZE)):
                    break
                yield data
        while worker.exit_code() is None:  # It has closed its output.
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    finally:
        os.close(process)


def _gpus(context: BarrierTaskContext) -> list[str]:
    found = context.resources().get("gpu")
    return list(found.addresses) if found is not None else []
