"""The communicator of a process that trains alone: a group of one rank, without a core."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist._src.comm import registry
from tfdist._src.comm.communicator_interface import NONE, Alone, Traffic
from tfdist._src.native.api import Link
from tfdist.errors import ClusterError


class OneRank(Alone):
    """What `tfdist.collective.communicator` returns in a process of its own.

    It has the properties and methods of a `NativeCommunicator`, so that a script need not ask how
    many processes run it.

    Args:
        name: the group's name.
    """

    hosts = (0,)

    def __init__(self, name: str) -> None:
        self.name = name
        self._failure: str | None = None

    def split(self, name: str, members: Sequence[int]) -> OneRank | None:
        """Creates a communicator of this rank; see `NativeCommunicator.split`.

        Args:
            name: the name of the new group.
            members: `[0]`, or none.

        Raises:
            ClusterError: there are other ranks among the members.
            ValueError: there is a communicator of this name.
        """
        registry.check_unreserved(name)
        if not len(members):
            return None
        if list(members) != [0]:
            raise ClusterError(
                f"mesh {name!r}: members must be distinct ranks from 0 to 0. Received: "
                f"{list(members)}. List each rank of the group once."
            )
        registry.check_new(name)
        part = OneRank(name)
        registry.put(name, part)
        return part

    def traffic(self) -> Traffic:
        """No traffic."""
        return NONE

    def links(self) -> list[Link]:
        """The counts of the connection to this rank, which are zero."""
        return list((Link * 1)())

    def abort(self, message: str) -> None:
        """Fails all later operations with this message."""
        self._failure = f"{message.rstrip('.')}."

    def close(self) -> None:
        """Leaves the group; idempotent."""
        registry.remove(self.name, self)

    def check(self) -> None:
        """Checks that the group can be used.

        Raises:
            tf.errors.UnavailableError: `abort` has been called.
        """
        if self._failure is not None:
            raise tf.errors.UnavailableError(None, None, self._failure)

    def all_to_all(self, tensor: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows for this rank, all of the tensor's, and their number.

        Raises:
            tf.errors.InvalidArgumentError: `rows` is no vector of the number of rows.
        """
        count = tf.shape(tensor, tf.int64)[:1]
        wrong = (
            "all_to_all needs, for each of 1 ranks, the number of rows that go to it, all together "
            "the tensor's."
        )
        given = tf.reshape(rows, [-1])
        same = tf.equal(tf.size(given), 1) & tf.reduce_all(tf.equal(given[:1], count))
        if tf.executing_eagerly():
            if not same:
                found = " ".join(map(str, given.numpy().tolist()))
                shape = f"[{','.join(map(str, tensor.shape))}]"
                raise invalid(f"{wrong} Received: rows {found} for a tensor of shape {shape}.")
            return tensor, rows
        found = tf.strings.format(
            "Received: rows {} for a tensor of shape {}.", (given, count), summarize=-1
        )
        checked = tf.debugging.Assert(same, [tf.strings.join([wrong, found], " ")])
        with tf.control_dependencies([checked]):
            return tf.identity(tensor), tf.identity(rows)


def invalid(message: str) -> Exception:
    """The error for an argument that a collective rejects."""
    error: Exception = tf.errors.InvalidArgumentError(None, None, message)
    return error
