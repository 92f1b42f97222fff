"""Errors in a pipeline: every rank learns of a failure; a lost worker is named with its stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist._src.comm import registry
from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.group.error_cause import cause
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist.errors import ProgramMismatchError, ReplicaMismatchError


class AllRanksFailed(Exception):
    """All ranks have failed together, so none waits for another.

    Attributes:
        error: the error on this rank.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def propagating_errors(strategy: HybridStrategy) -> Iterator[None]:
    """If this rank fails, fails what the other ranks wait for, unless all ranks fail together.

    Args:
        strategy: the pipeline's strategy.

    Raises:
        tf.errors.UnavailableError: another worker was lost or has failed; the message names it and
            its stages.
    """
    group = strategy.extended.group
    try:
        with group.naming_lost_workers():
            yield
    except (StopIteration, ProgramMismatchError, ReplicaMismatchError):
        raise
    except AllRanksFailed as failure:
        raise failure.error from failure.error.__cause__
    except tf.errors.UnavailableError as error:
        # Ranks that have no link to that worker may not know about it.
        _abort(str(error.message))
        raise
    except Exception as error:
        _abort(f"{group.described(group.topology.rank)} failed: {cause(error)}")
        raise


def _abort(message: str) -> None:
    """Fails all that other ranks wait for, whichever of them a communicator connects."""
    for communicator in registry.every():
        if isinstance(communicator, NativeCommunicator):
            communicator.abort(message)
