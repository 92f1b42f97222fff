"""Programs that all ranks build together, since the findings of one affect the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tfdist._src.group.group import Group
from tfdist._src.pipeline.runtime.engine import Engine
from tfdist._src.pipeline.runtime.microbatch_executor import MicrobatchExecutor
from tfdist.errors import PeerLostError


def agree_on_program(
    engine: Engine, group: Group, rows: int, *args: Any, **kwargs: Any
) -> MicrobatchExecutor:
    """Builds this rank's program; collective over all ranks of the job.

    Args:
        engine: this rank's engine.
        group: the group of all ranks.
        rows: the number of rows of the batch.
        *args: arguments of `Engine.program`.
        **kwargs: keyword arguments of `Engine.program`.

    Raises:
        PeerLostError: another rank could not build its program.
    """
    while True:
        programs: list[MicrobatchExecutor] = []

        def build(programs: list[MicrobatchExecutor] = programs) -> dict[str, Any]:
            programs.append(engine.program(*args, **kwargs))
            return engine.findings(programs[0], rows)

        if not engine.learn(_share(group, "pipeline", build)):
            return programs[0]


def agree_on_update(group: Group, trace: Callable[[], bool]) -> bool:
    """Whether all ranks can put the update of a step off; collective over all ranks of the job.

    Args:
        group: the group of all ranks.
        trace: traces the step on this rank; returns whether this one can.

    Raises:
        PeerLostError: another rank could not trace its step.
    """
    return all(report["late"] for report in _share(group, "update", lambda: {"late": trace()}))


def _share(group: Group, topic: str, build: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """What all ranks have found out by building something."""
    error = None
    try:
        report = build()
    except Exception as problem:
        # Reported rather than raised, as the other ranks would wait for this one.
        error, report = problem, {"error": f"{problem}"}
    reports = [json.loads(text) for text in group.exchange(topic, json.dumps(report))]
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if "error" in report:
            raise PeerLostError(
                f"{group.topology.workers[rank]} could not build its stages: {report['error']}"
            )
    return reports
