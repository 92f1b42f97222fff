"""Sums gradients over all workers, compressed where a policy says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collective.compressed import compressed_all_reduce
from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.compression.codec import Quantizer
from tfdist.compression.policy import Policy
from tfdist.internals.tensorflow import ResourceVariable

Sum = Callable[[list[Any]], list[Any]]


class Errors(tf.Module):  # type: ignore[misc]
    """What compressing an optimizer's gradients has lost so far on this worker.

    Each worker has its own. A `tf.train.Checkpoint` of the optimizer holds them.

    Attributes:
        in_order: float32 variables on the host, for each gradient that is compressed one.
    """

    def __init__(self, gradients_of: Sequence[Any], host: str) -> None:
        super().__init__(name="compression_errors")
        self._paths = tuple(variable.path for variable in gradients_of)
        with tf.init_scope(), tf.device(host):
            # Not mirrored by a strategy in scope. A checkpoint knows them by their order, since
            # Keras may give a model's variables other names the next time.
            self.in_order = [
                ResourceVariable(
                    tf.zeros(variable.shape, tf.float32),
                    trainable=False,
                    name=f"{variable.path}/compression_error",
                )
                for variable in gradients_of
            ]

    def of(self, path: str) -> tf.Variable:
        """The one of the variable with this path."""
        return self.in_order[self._paths.index(path)]


class Compressor:
    """Sums an optimizer's gradients over all workers, each of which has one replica.

    Args:
        policy: what to compress.
        communicator: over the workers.
    """

    def __init__(self, policy: Policy, communicator: NativeCommunicator) -> None:
        assert isinstance(policy.codec, Quantizer)
        self._policy = policy
        self._codec = policy.codec
        self._communicator = communicator

    def prepare(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Makes what the optimizer's gradients need, before any conditional is traced.

        Args:
            optimizer: a Keras optimizer; what was lost becomes an attribute of it.
            variables: all Keras variables that it trains.
        """
        if not self._codec.error_feedback or hasattr(optimizer, "compression_errors"):
            return
        chosen = [v for v in variables if self._policy.compresses(v)]
        optimizer.compression_errors = Errors(chosen, self._communicator.host)

    def sum(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], exact: Sum
    ) -> list[Any]:
        """Sums gradients.

        Args:
            optimizer: whose gradients they are.
            gradients: tensors and `tf.IndexedSlices`.
            variables: for each gradient its Keras variable.
            exact: sums gradients without compression.

        Returns:
            The sums, in the same order, bitwise equal on all workers.
        """
        chosen: list[int] = []
        rest: list[int] = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            sparse = isinstance(gradient, tf.IndexedSlices)
            (chosen if not sparse and self._policy.compresses(variable) else rest).append(i)
        sums: dict[int, Any] = {}
        if chosen:
            dense = [gradients[i] for i in chosen]
            paths = [variables[i].path for i in chosen]
            sums.update(zip(chosen, self._sum(optimizer, dense, paths, exact), strict=True))
        # These exist only when the backward pass is over, so they would hold up the others.
        if rest:
            sums.update(zip(rest, exact([gradients[i] for i in rest]), strict=True))
        return [sums[i] for i in range(len(gradients))]

    def _sum(
        self, optimizer: Any, tensors: list[tf.Tensor], paths: list[str], exact: Sum
    ) -> list[tf.Tensor]:
        step = tf.cast(optimizer.iterations, tf.int64)
        errors = []
        if self._codec.error_feedback:
            errors = [optimizer.compression_errors.of(path) for path in paths]

        def compressed() -> list[tf.Tensor]:
            return compressed_all_reduce(
                self._communicator,
                tensors,
                self._codec.encoding,
                errors,
                step,
                within_hosts=self._policy.within_hosts,
            )

        if not self._policy.warmup_steps:
            return compressed()
        return list(
            tf.cond(step < self._policy.warmup_steps, lambda: list(exact(tensors)), compressed)
        )
