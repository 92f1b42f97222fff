"""Chooses a codec, or none, by measuring how long a step's gradients take on the links."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.compression.codecs.codec import Codec
from tfdist._src.compression.codecs.int8 import Int8
from tfdist._src.compression.codecs.powersgd import PowerSGD
from tfdist._src.compression.codecs.terngrad import TernGrad
from tfdist._src.compression.gradient import Shape, count
from tfdist._src.compression.measurement import Measurement, measure, probe
from tfdist._src.compression.transport import Exchange

# A milder codec is preferred up to this many times the fastest codec's time.
_MILDER_TOLERANCE = 1.1
# No codec is preferred up to this factor, since communication is only part of a step.
_NONE_TOLERANCE = 1.3
# A link counts as changed if its time changes by this factor.
_CHANGED = 2.0


@dataclasses.dataclass(frozen=True)
class Auto:
    """`compression="auto"`: chooses the fastest of some codecs, or none, by measurement.

    Before the first step, all workers sum a sample of the model's gradients with each codec, on the
    actual links and processors, and choose the one that is fastest on the slowest worker, or a
    milder one that is nearly as fast. Compression stays off unless a codec saves at least 23 % of
    the time. A codec whose sums differ between workers is excluded. If at the start of an epoch the
    links have become twice as fast or slow, the workers measure again.

    Args:
        candidates: the codecs, the mildest first. The default ones need no warm-up and no change of
            the learning rate, although some models reach a higher final loss with `PowerSGD`.

    Raises:
        ValueError: the candidates are not a tuple of codecs.
    """

    candidates: tuple[Codec, ...] = (Int8(), TernGrad(), PowerSGD())

    def __post_init__(self) -> None:
        fits = isinstance(self.candidates, tuple)
        if not fits or not all(isinstance(codec, Codec) for codec in self.candidates):
            raise ValueError(
                f"`candidates` must be a tuple of codecs. Received: {self.candidates!r}. Pass, for "
                "example, (tfdist.compression.Int8(), tfdist.compression.TopK())."
            )


class Choice:
    """A choice among codecs, made by all workers together and identical on all of them.

    Args:
        auto: the candidates.
        exchange: the route to the other workers.
        device: the replica's device.

    Attributes:
        codec: the chosen codec; None for none, or before the choice.
        measurement: the reason for the choice; None before.
    """

    def __init__(self, auto: Auto, exchange: Exchange, device: str) -> None:
        self.codec: Codec | None = None
        self.measurement: Measurement | None = None
        self._auto, self._exchange, self._device = auto, exchange, device
        self._shapes: list[Shape] = []
        self._candidates: list[Codec] = []

    def make(self, optimizer: Any, shapes: list[Shape]) -> None:
        """Chooses for an optimizer's gradients of these shapes, unless already done."""
        if self.measurement is None and shapes:
            self._shapes = shapes
            self._candidates = [c for c in self._auto.candidates if not c.objection(optimizer)]
            with tf.init_scope():
                self._measure()

    def reconsider(self) -> bool:
        """Chooses again if the links have changed; returns whether the choice changed."""
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
            and seconds[codec]
            <= fastest * (_NONE_TOLERANCE if codec is None else _MILDER_TOLERANCE)
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
            f"tfdist: compression: chose {_kind(self.codec)}. The {megabytes:.1f} MB of gradients "
            f"of a step take: {times}."
        )


def _kind(codec: Codec | None) -> str:
    return "none" if codec is None else type(codec).__name__
