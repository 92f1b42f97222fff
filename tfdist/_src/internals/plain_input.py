"""Distributed datasets that are read by a plain iterator, which never reads ahead."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.input_lib import (
    _should_use_multi_device_iterator,
    _SingleWorkerDatasetIteratorBase,
)


@functools.cache
def plain_input() -> tf.distribute.InputOptions:
    """The options for a plain iterator, whose elements go to a worker's devices one by one.

    TensorFlow's default iterator reads ahead for each device. With these options it makes a plain
    one, but takes an element from it for one device only.
    """
    base = _SingleWorkerDatasetIteratorBase
    base.get_next_as_list = _one_per_device(base.get_next_as_list)
    base.get_next_as_optional_list = _one_per_device(base.get_next_as_optional_list)
    return tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )


def _one_per_device(next_elements: Any) -> Any:
    """Has a plain iterator give as many elements as it feeds devices; they are read in order."""

    @functools.wraps(next_elements)
    def elements(self: Any, *arguments: Any, **named: Any) -> list[Any]:
        reads = 1 if _should_use_multi_device_iterator(self._options) else len(self._devices)
        return [
            element for _ in range(reads) for element in next_elements(self, *arguments, **named)
        ]

    return elements
