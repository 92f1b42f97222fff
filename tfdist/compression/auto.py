"""Chooses a codec, or none, by what the gradients of a step take on these links."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist.cluster.net.wait_messages import say
from tfdist.compression.codecs.codec import Codec
from tfdist.compression.codecs.int8 import Int8
from tfdist.compression.codecs.powersgd import PowerSGD
from tfdist.compression.codecs.terngrad import TernGrad
from tfdist.compression.gradient import Shape, count
from tfdist.compression.measurement import Measurement, measure, probe
from tfdist.compression.transport import Exchange

# A milder codec is taken where it is nearly as fast as the fastest.
_NEARLY = 1.1
# The sum without any, where it is not much slower: beside it stands what the step computes.
_NONE_NEARLY = 1.3
# A link has changed that is so many times as fast or as slow.
_CHANGED = 2.0


@dataclasses.dataclass(frozen=True)
class Auto:
    """What `compression="auto"` stands for: the fastest of some codecs and none, as measured.

    Before the first step, all workers sum a sample of the model's gradients by each, on the links
    as they are and on their own processors, and take the one that is the fastest on the slowest
    worker; or a milder one that is nearly as fast. None is taken unless a codec saves a quarter of
    the time, and a codec whose sums are not the same on all workers is not. When an epoch begins
    and the links have become twice as fast or as slow, they measure again.

    Args:
        candidates: the codecs, the mildest first. The default ones need no warm-up and no other
            learning rate; with `PowerSGD`, some models then end at a higher loss all the same.

    Raises:
        ValueError: the candidates are no tuple of codecs.
    """

    candidates: tuple[Codec, ...] = (Int8(), TernGrad(), PowerSGD())

    def __post_init__(self) -> None:
        fits = isinstance(self.candidates, tuple)
        if not fits or not all(isinstance(codec, Codec) for codec in self.candidates):
            raise ValueError(
                f"`candidates` is a tuple of codecs. Received: {self.candidates!r}. Write "
                "(tfdist.compression.Int8(), tfdist.compression.TopK())."
            )


class Choice:
    """A choice among codecs, the same on all workers, who make it together.

    Args:
        auto: among what.
        exchange: the way to the other workers.
        device: the replica's.

    Attributes:
        codec: what was chosen; None for none, and before.
        measurement: why; None before.
    """

    def __init__(self, auto: Auto, exchange: Exchange, device: str) -> None:
        self.codec: Codec | None = None
        self.measurement: Measurement | None = None
        self._auto, self._exchange, self._device = auto, exchange, device
        self._shapes: list[Shape] = []
        self._candidates: list[Codec] = []

    def make(self, optimizer: Any, shapes: list[Shape]) -> None:
        """Chooses, for an optimizer's gradients of these shapes, unless that is done."""
        if self.measurement is None and shapes:
            self._shapes = shapes
            self._candidates = [c for c in self._auto.candidates if not c.objection(optimizer)]
            with tf.init_scope():
                self._measure()

    def reconsider(self) -> bool:
        """Chooses again where the links have changed; whether something else is chosen now."""
        if self.measurement is None:
            return False
        before, link = self.codec, probe(self._exchange)
        if 1 / _CHANGED < link / self.measurement.link_seconds < _CHANGED:
            return False
        self._measure()
        return self.codec != before

    def _measure(self) -> None:
        contenders = (None, *self._candidates)
        self.measurement = measure(self._exchange, contenders, self._shapes, self._device)
        seconds = self.measurement.seconds
        fastest = min(seconds.values())
        self.codec = next(
            codec
            for codec in contenders
            if codec in seconds
            and seconds[codec] <= fastest * (_NONE_NEARLY if codec is None else _NEARLY)
        )
        if self._exchange.workers.rank == 0:
            say(self._explanation())

    def _explanation(self) -> str:
        assert self.measurement is not None
        megabytes = 4e-6 * sum(map(count, self._shapes))
        times = ", ".join(
            f"{_kind(codec)} {1e3 * seconds:.1f} ms"
            for codec, seconds in sorted(self.measurement.seconds.items(), key=lambda item: item[1])
        )
        return (
            f"tfdist: compression: {_kind(self.codec)} is chosen. A step's {megabytes:.1f} MB of "
            f"gradients take: {times}."
        )


def _kind(codec: Codec | None) -> str:
    return "none" if codec is None else type(codec).__name__
