"""The channels between the ranks of a pipeline, and the propagation of errors to other ranks."""

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
    """One rank's end of a channel to or from another rank.

    Messages arrive in the order of their sends. Sends and receives return immediately; in a graph,
    a tensor is sent as soon as it is available, and received while the rank computes.

    Args:
        communicator: the communicator of the two ranks, the sender first.
    """

    def __init__(self, communicator: CoreCommunicator) -> None:
        self._communicator = communicator

    def send(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Operation]:
        """Sends tensors.

        Args:
            tensors: tensors of the shapes and dtypes that the receiver expects.
            name: the name that the receiver also passes to `receive`.

        Returns:
            The operations; each ends when its tensor has been sent.
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
            rows: the number of rows of the microbatch.
            name: the name that the sender also passes to `send`.
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
    """Groups pairs into rounds, so that each rank occurs at most once per round.

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
    """Opens the channels of all pipelines; collective over all ranks of the job.

    Args:
        pairs: pairs of sender and receiver pipeline ranks, the same for every pipeline.
        rank: this process's rank in the job.
        members: for each pipeline, its ranks in the job by pipeline rank.
        open_part: makes a communicator from a name and its ranks in the job; returns None on a
            rank that passes no ranks.

    Returns:
        The channels of this rank, by pair.
    """
    mine = next(ranks for ranks in members if rank in ranks)
    channels: dict[Pair, Channel] = {}
    for together in rounds(pairs):
        pair = next((p for p in together if rank in (mine[p[0]], mine[p[1]])), None)
        own = [] if pair is None else [mine[pair[0]], mine[pair[1]]]
        # The name is unique per set of ranks, since a process may use several meshes over time.
        between = " ".join(f"{source}>{target}" for source, target in together)
        part = open_part(f"channels {between} of {len(members)}x{len(mine)}", own)
        if part is not None and pair is not None:
            channels[pair] = Channel(part)
    return channels


class AllRanksFailed(Exception):
    """All ranks have failed together, so no rank waits for another.

    Attributes:
        error: the error on this rank.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def propagating_errors(strategy: HybridStrategy) -> Iterator[None]:
    """Aborts the other ranks' operations if this rank fails, unless all ranks fail together.

    Args:
        strategy: the pipeline's strategy.

    Raises:
        tf.errors.UnavailableError: another worker was lost or has failed; the message names it and
            its stages.
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
        # Ranks without a link to that worker may not notice its failure.
        known = group.cause_of(error, began_ns)
        _abort(Cause(str(error.message)) if known is None else known)
        raise
    except Exception as error:
        me = group.described(group.topology.rank)
        _abort(Cause(f"{me} failed: {cause(error)}", FAILED, str(group.topology.me)))
        raise


def _abort(cause: Cause) -> None:
    """Aborts the operations of all native communicators, which other ranks may wait for."""
    for communicator in registry.every():
        if isinstance(communicator, CoreCommunicator):
            communicator.context.aborter()(cause)
