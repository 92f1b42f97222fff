"""The interface between the strategies and a collective library, with its traffic counters."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf


@dataclass(frozen=True)
class Traffic:
    """A communicator's traffic so far.

    Attributes:
        collectives: the number of completed collectives and messages.
        shared_bytes: bytes copied into the memory shared by this host's ranks.
        sent_bytes: bytes written to connections with other hosts.
        received_bytes: bytes read from connections with other hosts.
        device_bytes: bytes of tensors in collectives and messages between GPUs, by NCCL or kernels,
            which the other counts exclude. Each GPU of this process counts its input or its output:
            the larger of the two.
    """

    collectives: int
    shared_bytes: int
    sent_bytes: int
    received_bytes: int
    device_bytes: int


NONE = Traffic(collectives=0, shared_bytes=0, sent_bytes=0, received_bytes=0, device_bytes=0)


class NativeCommunicator(abc.ABC):
    """This process's handle on a group of ranks, for the functions of `tfdist.collective`.

    `tfdist.collective.communicator` returns it.

    Attributes:
        name: the group's name, which the functions take as `communicator`.
    """

    name: str

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This process's rank, from 0."""

    @abc.abstractmethod
    def split(self, name: str, members: Sequence[int]) -> NativeCommunicator | None:
        """Creates a communicator of some of the job's ranks; called by all ranks together.

        Args:
            name: the name of the new group, the same on all ranks; several groups may have the
                same name if each process is in at most one of them.
            members: the job's ranks in this process's group, in the group's order; empty for a
                process in none.

        Returns:
            The new communicator; None for a process in no group.

        Raises:
            UnsupportedError: the ranks are threads of this process.
            ValueError: a process of the group already has a communicator with this name.
        """

    @abc.abstractmethod
    def traffic(self) -> Traffic:
        """This communicator's traffic so far."""

    @abc.abstractmethod
    def close(self) -> None:
        """Waits for pending operations and leaves the group; idempotent."""


class Communicator(Protocol):
    """One participant's handle on a group that runs collectives.

    Every participant calls the same operations in the same order, eagerly or while a
    `tf.function` is traced (the operation then runs whenever the function runs, including inside
    `tf.cond` and `tf.while_loop`).

    Attributes:
        size: the number of participants.
        rank: this participant's index, starting at 0.
        lasting_name: the name that identifies the group in the core even after its members change;
            "" if they do not change.
        across_workers: the core's names of the communicators that sums between workers use; empty
            if the core does not communicate them.
    """

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def lasting_name(self) -> str: ...

    @property
    def across_workers(self) -> tuple[str, ...]: ...

    def place(self) -> tuple[Any, Any]:
        """This participant's index and the number of participants, as available to a graph.

        Both are numbers, or int32 scalars that are read whenever the graph runs, if the group can
        change.
        """

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        """Sums over the participants.

        Args:
            tensors: tensors of numeric types, with the same shapes on all participants.
            key: distinguishes sums of the same shapes; compared among the participants if the
                library supports it.

        Returns:
            The sums, in the order, types and shapes of `tensors`; bitwise identical everywhere.
        """

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        """This participant's shard, along the first axis, of the sum over the participants.

        Args:
            tensor: a tensor of a numeric type; its first dimension is a multiple of `size`.
        """

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        """Concatenates along the first axis, in rank order.

        Args:
            tensor: a tensor of rank >= 1; the first dimension may differ between participants.
            key: as for `all_reduce`.
        """

    def broadcast(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        """Returns one participant's value, bit for bit, everywhere; shapes and types must agree."""


class Alone:
    """The communicator of a group of one, whose operations are no-ops."""

    size = 1
    rank = 0
    lasting_name = ""
    across_workers: tuple[str, ...] = ()

    def place(self) -> tuple[Any, Any]:
        return 0, 1

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        return list(tensors)

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        return tensor

    def broadcast(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        return tensor
