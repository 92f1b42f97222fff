"""What a worker asks of all at the end of a step: all learn of it in the same step.

A request travels in the collective that counts the rows of a batch, so it costs nothing.
"""

from __future__ import annotations

import enum

import tensorflow as tf

from tfdist.collective import tokens


class Request(enum.IntEnum):
    """What can be asked; the values are added up over workers and steps, so each has 15 bits."""

    SAVE_AND_EXIT = 1
    CHANGE_GROUP = 1 << 15


class StepRequests:
    """This process's requests."""

    def __init__(self) -> None:
        self._wanted: frozenset[Request] = frozenset()
        self._granted = self._published = 0
        self._resource: tf.Tensor | None = None

    def make(self, request: Request) -> None:
        """Asks in the next step; may be called in a signal handler, and in any thread."""
        self._wanted |= {request}

    def withdraw(self, request: Request) -> None:
        """Asks no more."""
        self._wanted -= {request}
        if self.is_granted(request):
            self._granted = 0

    def is_wanted(self, request: Request) -> bool:
        """Whether this worker asks."""
        return request in self._wanted

    def is_granted(self, request: Request) -> bool:
        """Whether any worker had asked when the last step began; the same on all."""
        return bool(self._granted // request % (1 << 15))

    def grant(self, asked: int) -> None:
        """Takes what has been asked in a step: the sum of `code` over workers and steps."""
        self._granted = asked

    @property
    def code(self) -> int:
        """What this worker asks, as a number to be summed."""
        return sum(self._wanted)

    def publish(self) -> None:
        """Makes what this worker asks visible to the step that is about to run."""
        if self.code != self._published:
            self._published = self.code
            tf.raw_ops.AssignVariableOp(
                resource=self._made(), value=tf.constant(self._published, tf.int32)
            )

    def in_graph(self) -> tf.Tensor:
        """What this worker asks, an int32 scalar that a step sums over the workers."""
        return tf.raw_ops.ReadVariableOp(resource=self._made(), dtype=tf.int32)

    def _made(self) -> tf.Tensor:
        if self._resource is None:
            device = str(tf.config.list_logical_devices("CPU")[0].name)
            self._resource = tokens.make(device, tf.int32)
        return self._resource


requests = StepRequests()
"""This process's."""
