"""How many batches the workers have, and how they notice the end of their data."""

from __future__ import annotations

import json
from typing import Any

import tensorflow as tf

from tfdist.internals.extended import set_batches
from tfdist.strategies.first_batch import different_data


def agree_on_end(
    extended: tf.distribute.StrategyExtended,
    distributed: Any,
    batches: int,
    *,
    same_data: bool = False,
    own_data: bool = True,
) -> None:
    """Sets, alike on all workers, how many batches there are and how their end is noticed.

    Where all workers run out at the same step they need not agree on it before each.

    Args:
        extended: of the strategy.
        distributed: the distributed dataset.
        batches: this worker's number of them, or TensorFlow's word for an unknown one.
        same_data: whether all workers read the same batches.
        own_data: whether they may be told to read batches of their own.

    Raises:
        ProgramMismatchError: the workers are to read the same data, and do not.
    """
    texts = extended.group.exchange("number of batches", json.dumps([batches, same_data]))
    said = [tuple(json.loads(text)) for text in texts]
    for rank, other in enumerate(said):
        if other != said[0] and (same_data or other[1]):
            both = _batches(*said[0]), _batches(*other)
            raise different_data(extended.group, rank, *both, own_data=own_data)
    counts = [count for count, _ in said]
    known = min(counts) >= 0
    endless = set(counts) == {tf.data.INFINITE_CARDINALITY}
    same = endless or (known and len(set(counts)) == 1)
    count = max(counts) if known or endless else tf.data.UNKNOWN_CARDINALITY
    set_batches(distributed, count, ends_together=same or extended.worker_count == 1)


def _batches(count: int, same_data: bool) -> str:
    if not same_data:
        return "batches of its own"
    if count == tf.data.INFINITE_CARDINALITY:
        return "batches without end"
    return "an unknown number of batches" if count < 0 else f"{count} batches"
