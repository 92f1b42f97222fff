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
        device_bytes: bytes of the tensors in collectives and messages that NCCL or GPU kernels
            transfer between GPUs; the other counts exclude them. For each GPU of this process, the
            larger of its input and its output counts.
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
            members: the ranks, in the job, of this process's group, in the order of the group;
                empty if this process belongs to no group.

        Returns:
            The new communicator; None if this process belongs to no group.

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
        lasting_name: the name by which the core finds the group even after its members change; ""
            if they do not change, or if the group has no single name in the core.
        across_workers: the names of the core's communicators that compute sums over workers; empty
            if the core does not compute them.
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
        """This participant's index and the number of participants, in a form that graphs can use.

        Both are Python integers. In a graph, if the group can change, they are int32 scalars that
        are read whenever the graph runs.
        """

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        """Sums over the participants.

        Args:
            tensors: tensors of numeric types, with the same shapes on all participants.
            key: distinguishes sums of the same shapes; compared among the participants if the
                library supports it.

        Returns:
            The sums, in the order, types and shapes of `tensors`; bitwise identical on all
            participants.
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
        """Returns the root's value, bit for bit, to all participants.

        The shapes and types must be equal on all participants.
        """


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
