"""What the strategies ask of a collective library: a handful of operations over one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf


class Communicator(Protocol):
    """One participant's handle on a group that runs collectives in step.

    Every participant calls the same operations in the same order, eagerly or while a
    `tf.function` is traced (then the operation runs whenever the function runs, inside
    `tf.cond` and `tf.while_loop` too).

    Attributes:
        size: the number of participants.
        rank: this participant's position, from 0.
    """

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        """Sums over the participants.

        Args:
            tensors: of numeric types and of the same shapes on all participants.
            key: what the sums are for, where several are alike; compared between the participants
                where that is possible.

        Returns:
            The sums, in the order, types and shapes of `tensors`; bitwise equal everywhere.
        """

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        """This participant's part, along the first axis, of the sum over the participants.

        Args:
            tensor: of a numeric type; its first dimension is a multiple of `size`.
        """

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        """Concatenates along the first axis, in rank order.

        Args:
            tensor: of rank one or more; the first dimension may differ between participants.
            key: as for `all_reduce`.
        """

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Gives everyone rank 0's value, bit for bit; shapes and types must agree."""


class Alone:
    """The communicator of a group of one: nothing to do."""

    size = 1
    rank = 0

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        return list(tensors)

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        return tensor

    def broadcast(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor
