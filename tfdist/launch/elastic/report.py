"""The messages of an elastic job: what was lost, what follows, and the summary at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tfdist.exit_codes import PREEMPTED
from tfdist.launch.hosts.worker_counts import WorkerCounts
from tfdist.launch.job.failure import Failure
from tfdist.launch.job.losses import Loss
from tfdist.launch.job.report import clause, date


def describe_loss(loss: Loss, *, others: bool) -> str:
    """One line on a worker that has failed.

    Args:
        loss: what was lost.
        others: whether other workers are running.

    Example:
        >>> killed = Failure(host=0, subject="worker 1", event="was killed by SIGKILL", code=137,
        ...                  rank=1, step=120)
        >>> describe_loss(Loss(killed, "replaced at once", final=False), others=True)
        'worker 1 was killed by SIGKILL, after step 120; replaced at once. The others go on.'
    """
    if loss.late:
        end = ""
    elif others:
        end = " The others go on."
    else:
        end = " No other worker is running here." if loss.final else ""
    log = f" Its log: {loss.failure.log}" if loss.failure.log else ""
    return f"{clause(loss.failure)}; {loss.fate}.{end}{log}"


def describe_leave(failure: Failure, *, others: bool) -> str:
    """One line on a worker that has left on request."""
    return f"{failure}{' The others go on without it.' if others else ''}"


def mark(rank: int, number: int, limit: int) -> str:
    """The line in a worker's log before the output of its replacement."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"--- tfdist run: replacement {number} of {limit} of worker {rank} starts at {now} ---"


def describe_end(losses: Sequence[Loss], job: WorkerCounts, code: int) -> str:
    """How the job has ended, with every loss; "" if nothing was lost.

    Args:
        losses: in order.
        job: what has become of the workers of all hosts.
        code: the exit code.
    """
    if not losses and code != PREEMPTED:
        return ""
    if code == PREEMPTED:
        head = (
            f"The workers that remained have saved their state, and the job ends with code "
            f"{PREEMPTED}; the same command continues it."
        )
    elif code:
        head = "The job has failed." if not job.completed else "The job has failed in the end."
    else:
        head = "The training is complete."
    if not losses:
        return head
    for_good = [loss.failure.subject for loss in losses if loss.final and not loss.late]
    if for_good and not code:
        head += f" It was completed without {', '.join(for_good)}."
    lines = (f"  {date(loss.failure.time)}: {clause(loss.failure)}; {loss.fate}" for loss in losses)
    return "\n".join([f"{head} Failures:", *lines])
