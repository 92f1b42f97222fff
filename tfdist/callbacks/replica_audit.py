"""A callback that checks that all replicas hold the same weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import keras
import numpy as np

from tfdist.errors import ReplicaMismatchError
from tfdist.strategies.extended import ReplicatedExtended


class ReplicaAudit(keras.callbacks.Callback):  # type: ignore[misc]
    """Compares a hash of every weight over all replicas of all workers, bit for bit.

    Synchronous training keeps the replicas equal; where code assigns weights on one worker alone,
    or draws different random numbers, they drift apart without a word. This finds the step at
    which that begins. It reads all weights, so it costs about a second per gigabyte of them.

    Args:
        every: after so many batches it compares; and at the end of the training.

    Raises:
        ValueError: `every` is not a positive integer.
        ReplicaMismatchError: in training, on all workers: names the first variable that differs,
            and where.

    Example:
        ```python
        model.fit(dataset, callbacks=[tfdist.callbacks.ReplicaAudit(every=100)])
        ```
    """

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                f"`every` must be a positive number of batches. Received: {every!r}. "
                "Give an integer such as 100."
            )
        self._every = every
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if self._batches % self._every == 0:
            self._compare()

    def on_train_end(self, logs: Any = None) -> None:
        self._compare()

    def _compare(self) -> None:
        strategy = self.model.distribute_strategy
        if strategy is None or not isinstance(strategy.extended, ReplicatedExtended):
            return
        group = strategy.extended.group
        variables = self._variables()
        mine = [[_hash(copy) for copy in _copies(variable)] for variable in variables]
        texts = group.exchange("replica audit", json.dumps(mine))
        workers = [json.loads(text) for text in texts]
        for i, variable in enumerate(variables):
            hashes = [(rank, j, h) for rank, w in enumerate(workers) for j, h in enumerate(w[i])]
            for rank, replica, found in hashes:
                if found != hashes[0][2]:
                    raise ReplicaMismatchError(
                        f"After {self._batches} batches the replicas are not equal: the variable "
                        f"{variable.path!r} differs between worker 0 and worker {rank}"
                        f"{f', replica {replica}' if len(workers[rank][i]) > 1 else ''}. Look for "
                        "code that changes weights on one worker alone, or by random numbers of "
                        "its own."
                    )

    def _variables(self) -> list[Any]:
        optimizer = getattr(self.model, "optimizer", None)
        return [*self.model.weights, *(optimizer.variables if optimizer else [])]


def _copies(variable: Any) -> list[Any]:
    value = variable.value
    return list(getattr(value, "values", [value]))


def _hash(value: Any) -> str:
    array = np.ascontiguousarray(value.numpy())
    return hashlib.blake2b(array.view(np.uint8).data, digest_size=8).hexdigest()
