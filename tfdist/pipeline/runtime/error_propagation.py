"""Failures in a pipeline: who fails tells all others, and who is lost is named with its stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfdist.errors import ProgramMismatchError
from tfdist.pipeline.placement.strategy import HybridStrategy
from tfdist.strategies.error_cause import cause


class Alike(Exception):
    """All ranks have failed together, and none waits for another one.

    Attributes:
        error: why, on this rank.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def propagating_errors(strategy: HybridStrategy, abort: Callable[[str], None]) -> Iterator[None]:
    """Fails what other ranks wait for where this one fails, except for what fails on all alike.

    Args:
        strategy: the pipeline's.
        abort: fails what others wait for, with a message.

    Raises:
        tf.errors.UnavailableError: another worker was lost or has failed; the message names it and
            its stages.
    """
    try:
        with strategy.extended.group.naming_lost_workers():
            yield
    except (StopIteration, ProgramMismatchError):
        raise
    except Alike as alike:
        raise alike.error from alike.error.__cause__
    except tf.errors.UnavailableError as error:
        # Those who share nothing with that worker may not have heard of it.
        message = _with_stages(strategy, str(error.message))
        abort(message)
        raise tf.errors.UnavailableError(None, None, message) from error
    except Exception as error:
        me = strategy.extended.group.topology.rank
        abort(f"{_described(strategy, me)} failed: {cause(error)}")
        raise


def _with_stages(strategy: HybridStrategy, message: str) -> str:
    for rank, worker in enumerate(strategy.extended.group.topology.workers):
        message = message.replace(f"{worker} is lost", f"{_described(strategy, rank)} is lost")
    return message


def _described(strategy: HybridStrategy, rank: int) -> str:
    place = strategy.extended.mesh.place_of(rank)
    stages = ", ".join(map(str, strategy.stages_of(place)))
    workers = strategy.extended.group.topology.workers
    # One process by itself is in no cluster.
    return f"{workers[rank] if workers else 'this process'}, which holds stage {stages},"
