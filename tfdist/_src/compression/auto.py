"""Chooses a codec by measuring how long a step's gradients take on the links."""

import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.compression.codecs.codec import Codec, device_of, has_fixed_size, objection_of
from tfdist._src.compression.codecs.powersgd import PowerSGD
from tfdist._src.compression.codecs.quantizers import Int8, TernGrad
from tfdist._src.compression.transport import Exchange, Gradient, Shape, State, count
from tfdist._src.log import logger

_PROBE_VALUES = 64 << 10
_PROBES = 5
_ROUNDS = 3
# Consecutive runs per codec and round: a link may transfer the first bytes faster.
_RUNS = 3
_SAMPLE_VALUES = 8 << 20
# The uncompressed sum is extrapolated from a sum that takes this long, or measured in full.
_PLAIN_SECONDS = 0.2
# A codec is skipped if its bytes alone take this many times the fastest codec's time.
_SKIP_FACTOR = 1.5


@dataclass(frozen=True)
class Measurement:
    """Measured times, the same on all workers.

    Attributes:
        seconds: for each codec, the time of a step's gradients on the slowest worker. Codecs are
            missing if their bytes alone take too long, or if their sums differ between workers. The
            time without a codec (None) is an estimate if it is too long.
        link_seconds: the time of a small sum without a codec.
    """

    seconds: dict[Codec | None, float]
    link_seconds: float


def probe(exchange: Exchange) -> float:
    """Returns the seconds of a small sum over all workers, the same on all; called by all."""
    values = tf.zeros([_PROBE_VALUES])
    run = functools.partial(exchange.workers.all_reduce, [values])
    # The first run allocates memory.
    seconds = [_time(exchange, run)[0] for _ in range(1 + _PROBES)][1:]
    return _slowest(exchange, [min(seconds)])[0]


def measure(
    exchange: Exchange, codecs: Sequence[Codec | None], shapes: Sequence[Shape], device: str
) -> Measurement:
    """Sums gradients with each codec, in rounds; called by all workers together.

    Args:
        exchange: the route to the other workers.
        codecs: the codecs; None means no compression.
        shapes: the shapes of all gradients.
        device: the replica's device.
    """
    link = probe(exchange)
    sample = _sample(shapes, _SAMPLE_VALUES)
    plain = _plain_seconds(exchange, sum(map(count, sample)), device)
    estimates = {codec: plain * _byte_ratio(codec, sample) for codec in codecs}
    runs: dict[Codec | None, _Sum] = {}
    fastest = float("inf")
    for codec in sorted(codecs, key=lambda codec: estimates[codec]):
        if estimates[codec] > _SKIP_FACTOR * fastest:
            continue
        runs[codec] = _Sum(exchange, codec, sample, device)
        _time(exchange, runs[codec])  # The first run allocates memory.
        fastest = min(fastest, *_slowest(exchange, [_time(exchange, runs[codec])[0]]))
    samples: dict[Codec | None, list[float]] = {codec: [] for codec in runs}
    checksums = dict.fromkeys(runs, 0)
    for _ in range(_ROUNDS):
        for codec, run in runs.items():
            seconds, checksums[codec] = _time(exchange, run, times=_RUNS)
            samples[codec].append(seconds)
    medians = _slowest(exchange, [median(times) for times in samples.values()])
    local = tf.constant([list(checksums.values())], tf.int64)
    gathered = exchange.workers.all_gather(local).numpy()
    agreed = np.all(gathered == gathered[0], axis=0)
    seconds_of: dict[Codec | None, float] = {None: plain}
    for codec, seconds, equal in zip(runs, medians, agreed, strict=True):
        if equal:
            seconds_of[codec] = seconds
    scale = sum(map(count, shapes)) / sum(map(count, sample))
    return Measurement({codec: scale * s for codec, s in seconds_of.items()}, link)


def _plain_seconds(exchange: Exchange, values: int, device: str) -> float:
    """The seconds of a sum without a codec, extrapolated from fewer values if it takes long."""
    some = min(values, _PROBE_VALUES)
    while True:
        with tf.device(device):
            tensor = tf.zeros([some])
        run = functools.partial(exchange.exact.all_reduce, [tensor])
        (seconds,) = _slowest(exchange, [_time(exchange, run)[0]])
        if seconds >= _PLAIN_SECONDS:
            return seconds * values / some
        if some == values:
            # The first run has allocated memory.
            again = [_time(exchange, run)[0] for _ in range(_ROUNDS)]
            return min(seconds, *_slowest(exchange, [min(again)]))
        some = min(values, 4 * some)


def _byte_ratio(codec: Codec | None, shapes: Sequence[Shape]) -> float:
    """The ratio of bytes sent with a codec to bytes sent without, by its `bits_per_value`."""
    if codec is None:
        return 1.0
    if not has_fixed_size(codec):
        return 0.0
    bits = sum(
        count(shape) * (codec.bits_per_value(shape) if codec.compresses(shape) else 32)
        for shape in shapes
    )
    return bits / (32 * sum(map(count, shapes)))


class _Sum:
    """Sums the same gradients repeatedly with one codec."""

    def __init__(
        self, exchange: Exchange, codec: Codec | None, shapes: Sequence[Shape], device: str
    ) -> None:
        self._exchange, self._codec = exchange, codec
        self._device = device if codec is None else device_of(codec, exchange, device)
        self._step = 0
        self._compressed: list[Gradient] = []
        self._exact: list[tf.Tensor] = []
        state = State()
        with tf.device(device):
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
                sums += self._exchange.exact.all_reduce(self._exact)
        return sums


def _time(
    exchange: Exchange, run: Callable[[], list[tf.Tensor]], times: int = 1
) -> tuple[float, int]:
    """The seconds of a run, and a checksum of its results."""
    exchange.workers.all_reduce([tf.zeros([1])])  # Start together.
    begin = time.perf_counter()
    for _ in range(times):
        arrays = [total.numpy() for total in run()]
    seconds = (time.perf_counter() - begin) / times
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, checksum)
    return seconds, checksum


def _slowest(exchange: Exchange, seconds: list[float]) -> list[float]:
    gathered = exchange.workers.all_gather(tf.constant([seconds], tf.float64)).numpy()
    return [float(most) for most in gathered.max(axis=0)]


def _sample(shapes: Sequence[Shape], values: int) -> list[Shape]:
    """The largest shapes, truncated along the first axis, up to this many values in total."""
    sample: list[Shape] = []
    for shape in sorted(shapes, key=count, reverse=True):
        rows = min(shape[0], max(1, values // max(1, count(shape[1:]))))
        sample.append((rows, *shape[1:]))
        values -= count(sample[-1])
        if values <= 0:
            break
    return sample


# A milder codec is preferred if it takes at most this many times the fastest codec's time.
_MILDER_TOLERANCE = 1.1
# Exact sums are preferred if they take at most this many times the fastest codec's time. The factor
# is larger, because communication is only part of a step.
_NONE_TOLERANCE = 1.3
# A link counts as changed if its time changes by this factor.
_CHANGED = 2.0


@dataclasses.dataclass(frozen=True)
class Auto:
    """`compression="auto"`: chooses the fastest of some codecs, or none, by measurement.

    Before the first step, all workers sum a sample of the model's gradients with each codec, on the
    actual links and processors, and choose the codec that is fastest on the slowest worker, or a
    milder codec that is nearly as fast. Compression stays off unless a codec saves at least 23 % of
    the time. A codec is excluded if its sums differ between workers. If the links have become twice
    as fast or half as fast at the start of an epoch, the workers measure again.

    Args:
        candidates: the codecs, the mildest first. The default codecs need no warm-up and no change
            of the learning rate, although some models reach a higher final loss with `PowerSGD`.

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
        codec: the chosen codec; None for no compression, or before the choice.
        measurement: the measurement that led to the choice; None before the choice.
    """

    def __init__(self, auto: Auto, exchange: Exchange, device: str) -> None:
        self.codec: Codec | None = None
        self.measurement: Measurement | None = None
        self._auto, self._exchange, self._device = auto, exchange, device
        self._shapes: list[Shape] = []
        self._candidates: list[Codec] = []

    def make(self, optimizer: Any, shapes: list[Shape]) -> None:
        """Makes the choice for an optimizer's gradients of these shapes, unless it is made."""
        if self.measurement is None and shapes:
            self._shapes = shapes
            self._candidates = [c for c in self._auto.candidates if not objection_of(c, optimizer)]
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
            logger.info(self._explanation())

    def _explanation(self) -> str:
        assert self.measurement is not None
        megabytes = 4e-6 * sum(map(count, self._shapes))
        times = ", ".join(
            f"{_kind(codec)} {1e3 * seconds:.1f} ms"
            for codec, seconds in sorted(self.measurement.seconds.items(), key=lambda item: item[1])
        )
        return (
            f"compression: chose {_kind(self.codec)}. The {megabytes:.1f} MB of gradients "
            f"of a step take: {times}."
        )


def _kind(codec: Codec | None) -> str:
    return "none" if codec is None else type(codec).__name__
