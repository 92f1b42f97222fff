"""Programs that all ranks build together, as what one finds in its stages matters to others."""

from __future__ import annotations

import json
from typing import Any

from tfdist.errors import PeerLostError
from tfdist.pipeline.runtime.engine import Engine
from tfdist.pipeline.runtime.microbatch_executor import MicrobatchExecutor
from tfdist.strategies.group import Group


def agree_on_program(engine: Engine, group: Group, *args: Any, **kwargs: Any) -> MicrobatchExecutor:
    """Builds this rank's program; all ranks of the job call it together.

    Args:
        engine: this rank's.
        group: all ranks.
        *args: of `Engine.program`.
        **kwargs: likewise.

    Raises:
        PeerLostError: another rank could not build its own.
    """
    while True:
        program, error = None, None
        try:
            program = engine.program(*args, **kwargs)
        except Exception as problem:
            error = problem
        # Otherwise the others would wait for one that has failed.
        said = {"error": f"{error}"} if program is None else engine.findings(program)
        answers = [json.loads(text) for text in group.exchange("pipeline", json.dumps(said))]
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise PeerLostError(
                    f"{group.topology.workers[rank]} could not build its stages: {answer['error']}"
                )
        assert program is not None
        if not engine.learn(answers):
            return program
