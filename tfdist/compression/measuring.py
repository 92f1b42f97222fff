"""What the sum of a step's gradients takes, by each codec, on the links as they are."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import tensorflow as tf

from tfdist.compression.codec import Codec
from tfdist.compression.exchange import Exchange
from tfdist.compression.gradient import Gradient, Shape, count
from tfdist.compression.state import State

_PROBE_VALUES = 64 << 10
_PROBES = 5
_ROUNDS = 4
# A sample of the gradients is summed: so many bytes that it takes about so long without a codec.
_SAMPLE_SECONDS = 0.25
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 32 << 20


@dataclass(frozen=True)
class Measurement:
    """What was measured, the same on all workers.

    Attributes:
        seconds: for each codec what the gradients of a step take on the slowest worker. One whose
            sums differ between workers is missing.
        link_seconds: what a small sum without a codec takes.
    """

    seconds: dict[Codec | None, float]
    link_seconds: float


def probe(exchange: Exchange) -> float:
    """Seconds of a small sum over all workers, the same number on all of them, who call it."""
    values = tf.zeros([_PROBE_VALUES])
    seconds = [_time(exchange, lambda: exchange.workers.all_reduce([values]))[0]]
    seconds += [
        _time(exchange, lambda: exchange.workers.all_reduce([values]))[0] for _ in range(_PROBES)
    ]
    return _slowest(exchange, [min(seconds[1:])])[0]


def measure(
    exchange: Exchange, codecs: Sequence[Codec | None], shapes: Sequence[Shape], device: str
) -> Measurement:
    """Sums a sample of gradients by each codec, in turns; all workers call this together.

    Args:
        exchange: the way to the other workers.
        codecs: None for none.
        shapes: of all gradients.
        device: of the replica.
    """
    link = probe(exchange)
    bytes_ = _SAMPLE_SECONDS / link * _PROBE_VALUES * 4
    sample = _sample(shapes, int(min(max(bytes_, _LEAST_BYTES), _MOST_BYTES)) // 4)
    scale = sum(map(count, shapes)) / sum(map(count, sample))
    sums = [_Sum(exchange, codec, sample, device) for codec in codecs]
    taken: list[list[float]] = [[] for _ in codecs]
    marks: list[int] = [0 for _ in codecs]
    for turn in range(1 + _ROUNDS):
        for i, run in enumerate(sums):
            seconds, marks[i] = _time(exchange, run)
            if turn:
                taken[i].append(seconds)
    medians = _slowest(exchange, [median(times) for times in taken])
    everyones = exchange.workers.all_gather(tf.constant([marks], tf.int64)).numpy()
    agreed = np.all(everyones == everyones[0], axis=0)
    return Measurement(
        {
            codec: scale * seconds
            for codec, seconds, equal in zip(codecs, medians, agreed, strict=True)
            if equal
        },
        link,
    )


class _Sum:
    """Sums the same gradients again and again by one codec."""

    def __init__(
        self, exchange: Exchange, codec: Codec | None, shapes: Sequence[Shape], device: str
    ) -> None:
        self._exchange, self._codec = exchange, codec
        self._device = exchange.workers.host if codec is None or codec.on_host else device
        self._step = 0
        self._compressed: list[Gradient] = []
        self._exact: list[tf.Tensor] = []
        state = State()
        with tf.device(self._device):
            for number, shape in enumerate(shapes):
                value = tf.random.stateless_normal(shape, [exchange.workers.rank, number])
                if codec is None or not codec.compresses(shape):
                    self._exact.append(value)
                    continue
                for name, kept in codec.kept(shape).items():
                    state.make(name, number, kept, codec.first, self._device)
                self._compressed.append(Gradient(value, number, state.of(number)))

    def __call__(self) -> list[tf.Tensor]:
        sums = []
        self._step += 1
        with tf.device(self._device):
            if self._codec is not None and self._compressed:
                step = tf.constant(self._step, tf.int64)
                sums += self._codec.sum(self._exchange, self._compressed, step)
            if self._exact:
                sums += self._exchange.workers.all_reduce(self._exact)
        return sums


def _time(exchange: Exchange, run: Callable[[], list[tf.Tensor]]) -> tuple[float, int]:
    """Seconds, and a mark that is another one for other results."""
    exchange.workers.all_reduce([tf.zeros([1])])  # Together.
    begin = time.perf_counter()
    arrays = [total.numpy() for total in run()]
    seconds = time.perf_counter() - begin
    mark = 0
    for array in arrays:
        mark = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, mark)
    return seconds, mark


def _slowest(exchange: Exchange, seconds: list[float]) -> list[float]:
    everyones = exchange.workers.all_gather(tf.constant([seconds], tf.float64)).numpy()
    return [float(most) for most in everyones.max(axis=0)]


def _sample(shapes: Sequence[Shape], values: int) -> list[Shape]:
    """The largest of the shapes, cut along the first axis, until they hold so many values."""
    sample: list[Shape] = []
    for shape in sorted(shapes, key=count, reverse=True):
        rows = min(shape[0], max(1, values // max(1, count(shape[1:]))))
        sample.append((rows, *shape[1:]))
        values -= count(sample[-1])
        if values <= 0:
            break
    return sample
