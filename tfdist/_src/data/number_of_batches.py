"""The workers' numbers of batches, and how they detect the end of their data."""

from __future__ import annotations

import json
from typing import Any

import tensorflow as tf

from tfdist._src.data.first_batch import different_data
from tfdist._src.data.same_files import check_same_files
from tfdist._src.internals.extended import set_batches


def agree_on_end(
    extended: tf.distribute.StrategyExtended,
    distributed: Any,
    batches: int,
    *,
    same_data: bool = False,
    per_worker_hint: bool = True,
    files: str = "",
) -> None:
    """Sets the number of batches and how their end is detected, the same on all workers.

    If all workers run out of data at the same step, they need not agree on it before each step.

    Args:
        extended: the strategy's engine.
        distributed: the distributed dataset.
        batches: this worker's number of batches, or TensorFlow's constant for an unknown number.
        same_data: whether all workers read the same batches.
        per_worker_hint: whether an error suggests how to read separate data on each worker.
        files: `describe_files` of the dataset, if this worker reads a share of its files.

    Raises:
        ProgramMismatchError: the workers must read the same data, and do not.
    """
    texts = extended.group.exchange("number of batches", json.dumps([batches, same_data, files]))
    answers = [tuple(json.loads(text)) for text in texts]
    for rank, answer in enumerate(answers):
        if answer[:2] != answers[0][:2] and (same_data or answer[1]):
            both = _batches(*answers[0][:2]), _batches(*answer[:2])
            raise different_data(extended.group, rank, *both, per_worker_hint=per_worker_hint)
    check_same_files(extended.group, [answer[2] for answer in answers])
    counts = [count for count, _, _ in answers]
    known = min(counts) >= 0
    endless = set(counts) == {tf.data.INFINITE_CARDINALITY}
    same = endless or (known and len(set(counts)) == 1)
    count = max(counts) if known or endless else tf.data.UNKNOWN_CARDINALITY
    set_batches(distributed, count, ends_together=same or not extended.spans_workers)


def _batches(count: int, same_data: bool) -> str:
    if not same_data:
        return "separate batches"
    if count == tf.data.INFINITE_CARDINALITY:
        return "infinitely many batches"
    return "an unknown number of batches" if count < 0 else f"{count} batches"
