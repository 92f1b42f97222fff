"""Channels between the ranks of a pipeline, and a context that reports errors to other ranks."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from tfdist._src.comm import native_ops, registry
from tfdist._src.comm.cause import FAILED, Cause
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.group import cause
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.pipeline.stages.value_specs import ValueSpec
from tfdist._src.strategy.extended import extended_of
from tfdist.errors import ProgramMismatchError, ReplicaMismatchError

Pair = tuple[int, int]


class Channel:
    """One rank's end of a channel, which transfers tensors from one rank to another.

    Tensors arrive in the order in which they were sent. `send` and `receive` do not wait for the
    transfer. In a graph, a tensor is sent as soon as it has been computed, and it is received while
    the receiving rank computes something else.

    Args:
        communicator: the communicator of the two ranks. The sender has rank 0 in it, and the
            receiver has rank 1.
    """

    def __init__(self, communicator: CoreCommunicator) -> None:
        self._communicator = communicator

    def send(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Operation]:
        """Sends tensors.

        Args:
            tensors: tensors with the shapes and dtypes that the receiver expects.
            name: a name for the message. The receiver must pass the same name to `receive`.

        Returns:
            For each tensor, an operation that ends when the tensor has been sent.
        """
        group = self._communicator
        with tf.device(group.device):
            return [native_ops.send(group.token, t, 1, group.name, name) for t in tensors]

    def receive(
        self, value_specs: Sequence[ValueSpec], rows: tf.Tensor, name: str
    ) -> list[tf.Tensor]:
        """Receives tensors.

        Args:
            value_specs: the specs of the tensors.
            rows: the number of rows of the microbatch, which determines the tensors' shapes.
            name: the name that the sender passes to `send`.
        """
        group = self._communicator
        received = []
        with tf.device(group.device):
            for value_spec in value_specs:
                shape = value_spec.shape_for(rows)
                tensor = native_ops.receive(
                    group.token, shape, value_spec.dtype, 0, group.name, name
                )
                received.append(tf.ensure_shape(tensor, value_spec.spec.shape))
        return received


def rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Groups pairs of ranks into rounds, so that each rank occurs at most once in a round.

    Example:
        >>> rounds([(0, 1), (1, 0), (1, 2), (2, 1)])
        [[(0, 1)], [(1, 0)], [(1, 2)], [(2, 1)]]
    """
    done: list[list[Pair]] = []
    for pair in sorted(set(pairs)):
        free = (r for r in done if not any(set(pair) & set(other) for other in r))
        into = next(free, None)
        if into is None:
            done.append(into := [])
        into.append(pair)
    return done


def open_channels(
    pairs: Iterable[Pair],
    rank: int,
    members: Sequence[Sequence[int]],
    open_part: Callable[[str, list[int]], CoreCommunicator | None],
) -> dict[Pair, Channel]:
    """Opens the channels of all pipelines; all ranks of the job must call it together.

    Args:
        pairs: pairs `(sender, receiver)` of pipeline ranks. Every pipeline opens a channel for
            each pair.
        rank: this process's rank in the job.
        members: for each pipeline, the ranks of the job in the order of their pipeline ranks.
        open_part: a function of a name and a list of ranks of the job. It returns a communicator
            of these ranks, or None if the list is empty. All ranks of the job call it together,
            and a rank passes either an empty list or a list that includes the rank itself.

    Returns:
        The channels in which this rank is the sender or the receiver, by pair.
    """
    mine = next(ranks for ranks in members if rank in ranks)
    channels: dict[Pair, Channel] = {}
    for together in rounds(pairs):
        pair = next((p for p in together if rank in (mine[p[0]], mine[p[1]])), None)
        own = [] if pair is None else [mine[pair[0]], mine[pair[1]]]
        # The name contains the size of the mesh, since a process may use several meshes over time.
        between = " ".join(f"{source}>{target}" for source, target in together)
        part = open_part(f"channels {between} of {len(members)}x{len(mine)}", own)
        if part is not None and pair is not None:
            channels[pair] = Channel(part)
    return channels


class AllRanksFailed(Exception):
    """Raised if every rank raises an error in this step, so that no rank waits for another.

    Attributes:
        error: the error of this rank.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def propagating_errors(strategy: HybridStrategy) -> Iterator[None]:
    """Aborts the communication of the other ranks if this rank raises an error in this context.

    Otherwise, the other ranks would wait for this rank. If all ranks raise an error together,
    nothing is aborted.

    Args:
        strategy: the pipeline's strategy.

    Raises:
        tf.errors.UnavailableError: another worker was lost or has failed. The message names the
            worker and its stages.
    """
    group, began_ns = extended_of(strategy).group, time.monotonic_ns()
    try:
        with group.naming_lost_workers():
            yield
    except (StopIteration, ProgramMismatchError, ReplicaMismatchError):
        raise
    except AllRanksFailed as failure:
        raise failure.error from failure.error.__cause__
    except tf.errors.UnavailableError as error:
        # Other ranks may have no connection to the worker that failed, so they may not notice its
        # failure unless this rank aborts them.
        known = group.cause_of(error, began_ns)
        _abort(Cause(str(error.message)) if known is None else known)
        raise
    except Exception as error:
        me = group.described(group.topology.rank)
        _abort(Cause(f"{me} failed: {cause(error)}", FAILED, str(group.topology.me)))
        raise


def _abort(cause: Cause) -> None:
    """Aborts all native communicators, so that no other rank waits for this rank."""
    for communicator in registry.every():
        if isinstance(communicator, CoreCommunicator):
            communicator.context.aborter()(cause)
