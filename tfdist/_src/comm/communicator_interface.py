"""The interfaces through which strategies and user code use a library of collectives."""

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
        collectives: the number of collectives and point-to-point messages that have completed.
        shared_bytes: the number of bytes copied into the memory that the ranks of this host share.
        sent_bytes: the number of bytes sent to other hosts.
        received_bytes: the number of bytes received from other hosts.
        device_bytes: the size, in bytes, of the tensors that NCCL or GPU kernels transferred
            between GPUs. An operation counts the larger of its input and its output, for each GPU
            of this process. The other byte counts do not include these tensors.
    """

    collectives: int
    shared_bytes: int
    sent_bytes: int
    received_bytes: int
    device_bytes: int


NONE = Traffic(collectives=0, shared_bytes=0, sent_bytes=0, received_bytes=0, device_bytes=0)


class NativeCommunicator(abc.ABC):
    """Represents a group of ranks to which this process belongs.

    `tfdist.collective.communicator` returns an object of this class.

    Attributes:
        name: the group's name. The functions of `tfdist.collective` accept it as their argument
            `communicator`.
    """

    name: str

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of ranks in the group."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This process's rank in the group, starting at 0."""

    @abc.abstractmethod
    def split(self, name: str, members: Sequence[int]) -> NativeCommunicator | None:
        """Creates communicators that each connect some of the job's ranks.

        All ranks of the job must call this method together.

        Args:
            name: the name of the new groups, the same on all ranks. Several groups may share the
                name if each process belongs to at most one of them.
            members: the members of this process's new group, as ranks in the job. Their order
                determines the ranks in the new group. Empty if this process belongs to no new
                group.

        Returns:
            The communicator of this process's new group; None if `members` is empty.

        Raises:
            UnsupportedError: the ranks of this communicator are threads of one process.
            ValueError: a member of a new group already has an open communicator with this name.
        """

    @abc.abstractmethod
    def traffic(self) -> Traffic:
        """Returns this communicator's traffic so far."""

    @abc.abstractmethod
    def close(self) -> None:
        """Waits for pending operations and leaves the group; later calls have no effect."""


class Communicator(Protocol):
    """The interface through which one participant calls the collectives of a group.

    All participants must call the same methods in the same order. A call in a `tf.function` adds
    the operation to the function's graph, which may also be the graph of a branch or a loop.

    Attributes:
        size: the number of participants.
        rank: this participant's index, starting at 0.
        lasting_name: the name under which the core knows the group. The name stays valid if the
            group's members change. It is "" if the members never change, or if the core knows the
            group under several names.
        across_workers: the names of the core's communicators that sum values over workers; empty if
            another library computes these sums.
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
        """Returns this participant's index and the number of participants.

        Both are Python integers in eager execution, and always if the group never changes.
        Otherwise they are int32 tensors in a graph, and the graph reads their current values each
        time it runs.
        """

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        """Sums each tensor over the participants.

        Args:
            tensors: tensors of numeric types, with the same shapes on all participants.
            key: a name for this call. If the library supports it, the participants compare their
                keys, to detect different calls with the same shapes.

        Returns:
            The sums, with the types and shapes of `tensors` and in the same order. They are bitwise
            identical on all participants.
        """

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums a tensor over the participants, and returns this participant's rows of the sum.

        Args:
            tensor: a tensor of a numeric type. Its first dimension must be a multiple of `size`.
        """

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        """Concatenates the participants' tensors along the first axis, in the order of their ranks.

        Args:
            tensor: a tensor with at least one axis. The size of the first axis may differ between
                participants.
            key: as for `all_reduce`.
        """

    def broadcast(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        """Returns the root's tensor on all participants, without changing any bit.

        All participants must pass a tensor of the same shape and type.
        """


class Alone:
    """The communicator of a group with one participant. Its operations return their input."""

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
