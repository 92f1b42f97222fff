"""Operations that tell the native core's recorder how far a step has come; they do nothing else."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import tokens
from tfdist._src.internals.tensorflow import get_current_replica_id_as_int


def ready(communicator: str, key: str = "", *, stalls: bool = True) -> Any:
    """What a collective needs exists.

    Args:
        communicator: the communicator's name.
        key: the collective's; "" if the step can do nothing more beside the one that runs.
        stalls: whether the step waits for it from now on.

    Returns:
        The operation, for control dependencies.
    """
    # That nothing more can be done is known when all is, but what is ready must be told at once.
    order = _order("ready" if key else "stalls")
    return native.load_ops().tfdist_ready(
        order=order, communicator=communicator, key=key, stalls=stalls
    )


def input_begins() -> Any:
    """The step waits for its input from now on."""
    return native.load_ops().tfdist_input_begins(order=_order("input"))


def input_ends() -> None:
    """The step has got its input."""
    native.load_ops().tfdist_input_ends(order=_order("input"))


def span_begins() -> tf.Tensor:
    """The time, for `span_ends`; zero unless spans are recorded."""
    return native.load_ops().tfdist_span_begins(order=_order("spans"))


def span_ends(begin: tf.Tensor, lane: str, name: str) -> None:
    """A span ends now."""
    native.load_ops().tfdist_span_ends(order=_order("spans"), begin=begin, lane=lane, span=name)


def _order(kind: str) -> tf.Tensor:
    return _resource(kind, get_current_replica_id_as_int())


@functools.cache
def _resource(kind: str, replica: int | None) -> tf.Tensor:
    """What keeps marks of one kind in order, and all others out of their way.

    Each replica has its own: a conditional with a mark holds the resource of the mark, and those of
    two replicas must not wait for each other, since both may contain parts of one collective.
    """
    return tokens.make(str(tf.config.list_logical_devices("CPU")[0].name), tf.float32)
