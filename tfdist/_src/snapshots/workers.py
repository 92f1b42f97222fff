"""The workers that take and read snapshots together, and the choice of who writes shared state."""

import contextlib
import errno
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdist._src.log import logger
from tfdist._src.snapshots.part_file import make_folder
from tfdist._src.strategy.extended import ReplicatedExtended

_PIECE_BYTES = 64 << 20
_FULL = errno.ENOSPC, errno.EDQUOT


@dataclass(frozen=True)
class Workers:
    """All workers of a job, as seen by one of them.

    Attributes:
        rank: this worker's rank.
        size: the number of workers.
        exchange: a function that takes a topic and this worker's text, and returns the texts of all
            workers in rank order.
        gather: a function that concatenates the bytes of all workers, in rank order.
    """

    rank: int
    size: int
    exchange: Callable[[str, str], list[str]]
    gather: Callable[[tf.Tensor], tf.Tensor]


def workers_of(extended: ReplicatedExtended) -> Workers:
    """Returns the workers of a strategy."""
    group = extended.group
    in_stages = extended.in_stages and group.topology.size > 1
    everyone = group.native() if in_stages else extended.workers
    topology = group.topology
    return Workers(topology.rank, topology.size, group.exchange, everyone.all_gather)


def broadcast_bytes(contents: bytes, sender: int, workers: Workers) -> bytes:
    """Broadcasts bytes from one worker to all workers; all workers must call this function.

    Args:
        contents: the bytes on the sender; empty on all other workers.
        sender: the rank of the sender.
        workers: all workers.
    """
    counts = workers.exchange("number of bytes", str(len(contents)))
    pieces = []
    for start in range(0, int(counts[sender]), _PIECE_BYTES):
        mine = np.frombuffer(contents[start : start + _PIECE_BYTES], np.uint8)
        pieces.append(workers.gather(tf.constant(mine, tf.uint8)).numpy().tobytes())
    return b"".join(pieces)


def writes_shared_state(
    directory: Path,
    workers: Workers,
    extended: ReplicatedExtended,
    *,
    tolerate_failure: bool = False,
) -> bool:
    """Returns whether this worker writes the state that other workers also hold.

    Of the workers that share a directory, only the first worker writes this state. In pipelines,
    the first worker of each stage writes the state of the stage if all workers share one directory;
    otherwise, every worker writes. All workers must call this function.

    Args:
        directory: this worker's directory, which is created if necessary.
        workers: all workers.
        extended: the strategy's engine.
        tolerate_failure: whether training continues if a worker cannot write to its directory. The
            worker then logs an error, and later tries to write by itself.

    Raises:
        ValueError: a worker cannot write to its directory, although the disk is not full. All
            workers raise this error.
    """
    token, problem, is_full = uuid.uuid4().hex, "", False
    mark = _mark(directory, workers.rank)
    try:
        make_folder(directory)
        mark.write_text(token)
    except OSError as error:
        problem, is_full = error.strerror or str(error), error.errno in _FULL
    texts = workers.exchange("directory", json.dumps([token, problem, is_full]))
    answers = [json.loads(text) for text in texts]
    if problem and (tolerate_failure or is_full):
        logger.error(
            f"worker {workers.rank} cannot write to {directory}: {problem}. Training "
            "continues, and later snapshots will be attempted. Free space, or correct the "
            "directory of tfdist.callbacks.BackupAndRestore."
        )
    for rank, (_, text, full) in enumerate(answers):
        if text and not (tolerate_failure or full):
            with contextlib.suppress(OSError):
                mark.unlink()
            raise ValueError(
                "`directory` must be a folder that every worker can write to. Received: "
                f"{str(directory)!r}, on worker {rank}: {text}. Choose another one."
            )
    tokens = [token for token, *_ in answers]
    seen = (r for r, one in enumerate(tokens) if _text_of(_mark(directory, r)) == one)
    first = next(seen, workers.rank)
    firsts = workers.exchange("directory seen", str(first))
    with contextlib.suppress(OSError):
        mark.unlink()
    if extended.in_stages:
        return extended.worker_rank == 0 or len(set(firsts)) > 1
    return first == workers.rank


def _mark(directory: Path, rank: int) -> Path:
    return directory / f".worker-{rank}"


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
