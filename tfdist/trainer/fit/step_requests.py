"""What a worker asks of all at the end of a step: all learn of it in the same step.

A request travels in the collective that counts the rows of a batch, so it costs nothing.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collective import tokens


class StepRequests:
    """This process's requests.

    Attributes:
        granted: whether any worker had made a request when the last step began; the same on all.
    """

    def __init__(self) -> None:
        self.granted = False
        self._wanted = self._published = False
        self._resource: tf.Tensor | None = None

    def make(self) -> None:
        """Asks in the next step; may be called in a signal handler."""
        self._wanted = True

    def withdraw(self) -> None:
        """Asks no more."""
        self._wanted = self.granted = False

    @property
    def wanted(self) -> bool:
        """Whether this worker asks."""
        return self._wanted

    def publish(self) -> None:
        """Makes what this worker asks visible to the step that is about to run."""
        if self._wanted != self._published:
            self._published = self._wanted
            tf.raw_ops.AssignVariableOp(
                resource=self._made(), value=tf.constant(int(self._wanted), tf.int32)
            )

    def in_graph(self) -> tf.Tensor:
        """1 if this worker asks, else 0; an int32 scalar that a step sums over the workers."""
        return tf.raw_ops.ReadVariableOp(resource=self._made(), dtype=tf.int32)

    def _made(self) -> tf.Tensor:
        if self._resource is None:
            device = str(tf.config.list_logical_devices("CPU")[0].name)
            self._resource = tokens.make(device, tf.int32)
        return self._resource


requests = StepRequests()
"""This process's."""
