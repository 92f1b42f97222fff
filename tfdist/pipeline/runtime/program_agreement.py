"""Programs that all ranks build together, since the findings of one affect the others."""

from __future__ import annotations

import json
from typing import Any

from tfdist.errors import PeerLostError
from tfdist.pipeline.runtime.engine import Engine
from tfdist.pipeline.runtime.microbatch_executor import MicrobatchExecutor
from tfdist.strategies.group import Group


def agree_on_program(engine: Engine, group: Group, *args: Any, **kwargs: Any) -> MicrobatchExecutor:
    """Builds this rank's program; collective over all ranks of the job.

    Args:
        engine: this rank's engine.
        group: the group of all ranks.
        *args: arguments of `Engine.program`.
        **kwargs: keyword arguments of `Engine.program`.

    Raises:
        PeerLostError: another rank could not build its program.
    """
    while True:
        program, error = None, None
        try:
            program = engine.program(*args, **kwargs)
        except Exception as problem:
            error = problem
        # Reported rather than raised, as the other ranks would wait for this one.
        report = {"error": f"{error}"} if program is None else engine.findings(program)
        reports = [json.loads(text) for text in group.exchange("pipeline", json.dumps(report))]
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if "error" in report:
                raise PeerLostError(
                    f"{group.topology.workers[rank]} could not build its stages: {report['error']}"
                )
        assert program is not None
        if not engine.learn(reports):
            return program
