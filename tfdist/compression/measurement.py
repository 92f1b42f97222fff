"""What the sum of a step's gradients takes, by each codec, on the links as they are."""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import tensorflow as tf

from tfdist.compression.codecs.codec import Codec
from tfdist.compression.gradient import Gradient, Shape, count
from tfdist.compression.state import State
from tfdist.compression.transport import Exchange

_PROBE_VALUES = 64 << 10
_PROBES = 5
_TURNS = 3
# Of each codec in a turn, without a pause: a link may let the first bytes pass faster than others.
_RUNS = 3
_SAMPLE_VALUES = 8 << 20
# The plain sum is measured by one that takes so long, or is as large as the sample.
_PLAIN_SECONDS = 0.2
# Who needs so many times what the fastest takes, for its bytes alone, is not tried.
_HOPELESS = 1.5


@dataclass(frozen=True)
class Measurement:
    """What was measured, the same on all workers.

    Attributes:
        seconds: for each codec what the gradients of a step take on the slowest worker. Missing is
            one whose bytes alone take too long, and one whose sums differ between workers. What
            None takes is an estimate where it takes too long.
        link_seconds: what a small sum without a codec takes.
    """

    seconds: dict[Codec | None, float]
    link_seconds: float


def probe(exchange: Exchange) -> float:
    """Seconds of a small sum over all workers, the same number on all of them, who call it."""
    values = tf.zeros([_PROBE_VALUES])
    run = functools.partial(exchange.workers.all_reduce, [values])
    # The first one makes the memory.
    seconds = [_time(exchange, run)[0] for _ in range(1 + _PROBES)][1:]
    return _slowest(exchange, [min(seconds)])[0]


def measure(
    exchange: Exchange, codecs: Sequence[Codec | None], shapes: Sequence[Shape], device: str
) -> Measurement:
    """Sums gradients by each codec, in turns; all workers call this together.

    Args:
        exchange: the way to the other workers.
        codecs: None for none.
        shapes: of all gradients.
        device: of the replica.
    """
    link = probe(exchange)
    sample = _sample(shapes, _SAMPLE_VALUES)
    plain = _plain_seconds(exchange, sum(map(count, sample)))
    least = {codec: plain * _share_of_bytes(codec, sample) for codec in codecs}
    runs: dict[Codec | None, _Sum] = {}
    fastest = float("inf")
    for codec in sorted(codecs, key=lambda codec: least[codec]):
        if least[codec] > _HOPELESS * fastest:
            continue
        runs[codec] = _Sum(exchange, codec, sample, device)
        _time(exchange, runs[codec])  # The first one makes the memory.
        fastest = min(fastest, *_slowest(exchange, [_time(exchange, runs[codec])[0]]))
    taken: dict[Codec | None, list[float]] = {codec: [] for codec in runs}
    marks = dict.fromkeys(runs, 0)
    for _ in range(_TURNS):
        for codec, run in runs.items():
            seconds, marks[codec] = _time(exchange, run, times=_RUNS)
            taken[codec].append(seconds)
    medians = _slowest(exchange, [median(times) for times in taken.values()])
    everyones = exchange.workers.all_gather(tf.constant([list(marks.values())], tf.int64)).numpy()
    agreed = np.all(everyones == everyones[0], axis=0)
    seconds_of: dict[Codec | None, float] = {None: plain}
    for codec, seconds, equal in zip(runs, medians, agreed, strict=True):
        if equal:
            seconds_of[codec] = seconds
    scale = sum(map(count, shapes)) / sum(map(count, sample))
    return Measurement({codec: scale * s for codec, s in seconds_of.items()}, link)


def _plain_seconds(exchange: Exchange, values: int) -> float:
    """What a sum of so many values takes without a codec, from one that may be of fewer."""
    some = min(values, _PROBE_VALUES)
    while True:
        tensor = tf.zeros([some])
        run = functools.partial(exchange.workers.all_reduce, [tensor])
        (seconds,) = _slowest(exchange, [_time(exchange, run)[0]])
        if seconds >= _PLAIN_SECONDS:
            return seconds * values / some
        if some == values:
            # The first one has made the memory.
            again = [_time(exchange, run)[0] for _ in range(_TURNS)]
            return min(seconds, *_slowest(exchange, [min(again)]))
        some = min(values, 4 * some)


def _share_of_bytes(codec: Codec | None, shapes: Sequence[Shape]) -> float:
    """What crosses the network with a codec, over what does without, as its formula has it."""
    if codec is None:
        return 1.0
    if not codec.has_fixed_size:
        return 0.0
    bits = sum(
        count(shape) * (codec.bits_per_value(shape) if codec.compresses(shape) else 32)
        for shape in shapes
    )
    return bits / (32 * sum(map(count, shapes)))


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


def _time(
    exchange: Exchange, run: Callable[[], list[tf.Tensor]], times: int = 1
) -> tuple[float, int]:
    """Seconds of a run, and a mark that is another one for other results."""
    exchange.workers.all_reduce([tf.zeros([1])])  # Together.
    begin = time.perf_counter()
    for _ in range(times):
        arrays = [total.numpy() for total in run()]
    seconds = (time.perf_counter() - begin) / times
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
