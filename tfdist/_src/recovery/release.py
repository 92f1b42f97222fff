"""Lets the workers leave that SIGTERM has asked, while the others go on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Sequence

from tfdist._src.cluster import Membership
from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.exit_codes import PREEMPTED
from tfdist._src.group.group import Group
from tfdist._src.recovery.preemption import preemption
from tfdist._src.recovery.stages import OthersLeave
from tfdist._src.recovery.standing import Standing
from tfdist._src.snapshots.held_shards import HeldShards, find_shards
from tfdist.errors import TfdistError

_GATHER_SECONDS = 0.5
"""Launchers and schedulers signal the workers of a job one after the other."""


def release(
    group: Group,
    membership: Membership,
    alike: Sequence[Sequence[int]] | None,
    shards: tuple[HeldShards, ...] | None,
    *,
    min_workers: int,
    steps: int,
) -> None:
    """Lets the workers leave that SIGTERM has asked; called by all of them at the end of a step.

    It returns if all have to leave: nobody else is there, the others could not train on, or their
    launcher takes a worker that leaves for the end of the job.

    Args:
        group: the workers.
        membership: this one's.
        alike: see `can_go_on`.
        shards: what this worker holds of a sharded optimizer.
        min_workers: see `can_go_on`.
        steps: see `can_go_on`.

    Raises:
        SystemExit: this worker leaves, and others go on.
        OthersLeave: others leave.
        TfdistError: a worker is lost.
    """
    time.sleep(_GATHER_SECONDS)
    mine = [preemption.asked, group.options.elastic, Standing(shards=shards).to_json()]
    answers = [json.loads(text) for text in group.exchange("SIGTERM", json.dumps(mine))]
    leaving = {rank for rank, (asked, _, _) in enumerate(answers) if asked}
    held = [Standing.from_json(text).shards for _, _, text in answers]
    elastic = all(elastic for _, elastic, _ in answers)
    if not elastic or not can_go_on(leaving, held, alike, min_workers, steps):
        return
    me = group.topology.rank
    if me == min(leaving):
        names = ", ".join(str(group.topology.workers[rank]) for rank in sorted(leaving))
        say(
            f"tfdist: SIGTERM: leaving after {steps} steps with exit code {PREEMPTED}: {names}. "
            "The others go on."
        )
    if me not in leaving:
        membership.release(leaving)
        raise OthersLeave(leaving)
    with contextlib.suppress(TfdistError):  # Those that are left form a new group in any case.
        membership.release(leaving)
    raise SystemExit(PREEMPTED)


def can_go_on(
    leaving: Collection[int],
    held: Sequence[tuple[HeldShards, ...] | None],
    alike: Sequence[Sequence[int]] | None,
    min_workers: int,
    steps: int,
) -> bool:
    """Whether workers can train on without some, with the state that these have.

    Args:
        leaving: the ranks of those that leave.
        held: what each worker holds of a sharded optimizer, in rank order.
        alike: the ranks that hold the same part of the model, for each part; None if all hold all
            of it.
        min_workers: how many must train on.
        steps: after how many steps.

    Example:
        >>> pipelines = [[0, 2], [1, 3]]  # 0 and 1 hold a model's two stages, and so do 2 and 3
        >>> can_go_on({2}, [None] * 4, pipelines, min_workers=2, steps=7)
        True
        >>> can_go_on({1, 2}, [None] * 4, pipelines, min_workers=3, steps=7)
        False
    """
    parts = alike or [range(len(held))]
    left = len(parts) * min(len(set(ranks) - set(leaving)) for ranks in parts)
    shards = [one for rank, one in enumerate(held) if rank not in leaving and one is not None]
    whole = not shards or find_shards(shards, steps) is not None
    return left >= max(1, min_workers) and whole
