"""Errors in a pipeline: every rank learns of a failure; a lost worker is named with its stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdist.errors import ProgramMismatchError
from tfdist.pipeline.placement.strategy import HybridStrategy
from tfdist.strategies.error_cause import cause


class AllRanksFailed(Exception):
    """All ranks have failed together, so none waits for another.

    Attributes:
        error: the error on this rank.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def propagating_errors(strategy: HybridStrategy, abort: Callable[[str], None]) -> Iterator[None]:
    """If this rank fails, fails what the other ranks wait for, unless all ranks fail together.

    Args:
        strategy: the pipeline's strategy.
        abort: fails what the other ranks wait for, with a message.

    Raises:
        tf.errors.UnavailableError: another worker was lost or has failed; the message names it and
            its stages.
    """
    try:
        with strategy.extended.group.naming_lost_workers():
            yield
    except (StopIteration, ProgramMismatchError):
        raise
    except AllRanksFailed as failure:
        raise failure.error from failure.error.__cause__
    except tf.errors.UnavailableError as error:
        # Ranks that have no link to that worker may not know about it.
        message = _with_stages(strategy, str(error.message))
        abort(message)
        raise tf.errors.UnavailableError(None, None, message) from error
    except Exception as error:
        me = strategy.extended.group.topology.rank
        abort(f"{_describe(strategy, me)} failed: {cause(error)}")
        raise


def _with_stages(strategy: HybridStrategy, message: str) -> str:
    for rank, worker in enumerate(strategy.extended.group.topology.workers):
        message = message.replace(f"{worker} is lost", f"{_describe(strategy, rank)} is lost")
    return message


def _describe(strategy: HybridStrategy, rank: int) -> str:
    pipeline_rank = strategy.extended.mesh.pipeline_rank_of(rank)
    stages = ", ".join(map(str, strategy.stages_of(pipeline_rank)))
    workers = strategy.extended.group.topology.workers
    # A single process has no cluster.
    return f"{workers[rank] if workers else 'this process'}, which holds stage {stages},"
