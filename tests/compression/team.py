"""Codecs between ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.comm.device_communicator import open_local_communicators
from tfdist._src.compression.codecs.codec import Codec
from tfdist._src.compression.transport import Exchange, Gradient, State
from tfdist._src.options import Options

Array = np.ndarray[Any, Any]


class Member:
    """A rank's codec, and what it keeps.

    Attributes:
        state: what it keeps.
    """

    def __init__(self, codec: Codec, exchange: Exchange, shapes: Sequence[tuple[int, ...]]) -> None:
        self._codec, self._exchange = codec, exchange
        self.state = State()
        for number, shape in enumerate(shapes):
            for name, kept in codec.kept(shape).items():
                self.state.make(name, number, kept, codec.first, exchange.workers.device)

    def sum(self, gradients: Sequence[Array], step: int) -> list[Array]:
        """One step's sums over all ranks."""
        mine = [
            Gradient(tf.constant(value), number, self.state.of(number))
            for number, value in enumerate(gradients)
        ]
        sums = self._codec.sum(self._exchange, mine, tf.constant(step, tf.int64))
        return [total.numpy() for total in sums]

    def kept(self, name: str) -> list[Array]:
        """What is kept under a name, for each gradient, flat."""
        return [variable.numpy().copy() for variable in getattr(self.state, name).values()]


def on_ranks(
    codec: Codec, ranks: int, shapes: Sequence[tuple[int, ...]], body: Callable[[int, Member], Any]
) -> list[Any]:
    """Runs a function on every rank at once.

    Args:
        codec: of all ranks.
        ranks: how many.
        shapes: of the gradients.
        body: gets the rank and its codec.

    Returns:
        For each rank the function's result.
    """
    names = [f"rank {rank}" for rank in range(ranks)]
    communicators = open_local_communicators("ranks", names, Options.from_environment())
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            exchange = Exchange(communicators[rank], within_hosts=True)
            results[rank] = body(rank, Member(codec, exchange, shapes))
        except BaseException as error:
            errors.append(error)
            communicators[rank].abort(f"rank {rank} has failed")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for communicator in communicators:
        communicator.close()
    if errors:
        raise errors[0]
    return results


def alone(codec: Codec, *gradients: Array) -> tuple[list[Array], Member]:
    """The sums of one rank, a gradient a step."""

    def body(_: int, member: Member) -> tuple[list[Array], Member]:
        return [member.sum([g], step)[0] for step, g in enumerate(gradients)], member

    return on_ranks(codec, 1, [gradients[0].shape], body)[0]


def draw(shape: Any, seed: int = 0, scale: float = 1.0) -> Array:
    """Normal values."""
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)
