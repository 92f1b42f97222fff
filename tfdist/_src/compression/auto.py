"""Chooses a codec by measuring how long the workers need to sum a step's gradients."""

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
# The number of consecutive runs of a codec in a round. One run is not enough, because a link may
# transfer the first bytes faster than the following ones.
_RUNS = 3
_SAMPLE_VALUES = 8 << 20
# The uncompressed sum is measured with an increasing number of values. Once it takes this many
# seconds, the time for all values is extrapolated.
_PLAIN_SECONDS = 0.2
# A codec is not measured if the transfer of its bytes would take longer than this factor times the
# time of the fastest codec.
_SKIP_FACTOR = 1.5


@dataclass(frozen=True)
class Measurement:
    """The times that the workers have measured. All workers have the same values.

    Attributes:
        seconds: for each codec, the time that the slowest worker needs to sum a step's gradients.
            The key None is the time without a codec, which is an estimate if the sum takes long.
            Codecs are missing if the transfer of their bytes would take too long, or if their sums
            differed between workers.
        link_seconds: the time of a small sum without a codec. It shows later whether the links have
            become faster or slower.
    """

    seconds: dict[Codec | None, float]
    link_seconds: float


def probe(exchange: Exchange) -> float:
    """Measures the time of a small sum over all workers.

    All workers must call this function together.

    Returns:
        The number of seconds on the slowest worker, the same on all workers.
    """
    values = tf.zeros([_PROBE_VALUES])
    run = functools.partial(exchange.workers.all_reduce, [values])
    # The first run does not count, because it also allocates memory.
    seconds = [_time(exchange, run)[0] for _ in range(1 + _PROBES)][1:]
    return _slowest(exchange, [min(seconds)])[0]


def measure(
    exchange: Exchange, codecs: Sequence[Codec | None], shapes: Sequence[Shape], device: str
) -> Measurement:
    """Measures how long the workers need to sum gradients with each codec.

    All workers must call this function together.

    Args:
        exchange: the connections of this replica to the other workers.
        codecs: the codecs to measure. None stands for a sum without compression.
        shapes: the shapes of all gradients of a step.
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
        _time(exchange, runs[codec])  # This run does not count, because it also allocates memory.
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
    """Measures the seconds that a sum of `values` values takes without a codec.

    If the sum takes long, its time is extrapolated from a sum of fewer values.
    """
    some = min(values, _PROBE_VALUES)
    while True:
        with tf.device(device):
            tensor = tf.zeros([some])
        run = functools.partial(exchange.exact.all_reduce, [tensor])
        (seconds,) = _slowest(exchange, [_time(exchange, run)[0]])
        if seconds >= _PLAIN_SECONDS:
            return seconds * values / some
        if some == values:
            # Measure again, because the first run has also allocated memory.
            again = [_time(exchange, run)[0] for _ in range(_ROUNDS)]
            return min(seconds, *_slowest(exchange, [min(again)]))
        some = min(values, 4 * some)


def _byte_ratio(codec: Codec | None, shapes: Sequence[Shape]) -> float:
    """Returns the number of bytes sent with a codec, relative to the number without a codec."""
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
    """Sums the same gradients with one codec each time it is called."""

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
    """Returns the average number of seconds of several runs, and a checksum of the last results."""
    exchange.workers.all_reduce([tf.zeros([1])])  # Makes all workers start together.
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
    """Selects the largest shapes, until they have about `values` values in total.

    Shapes that are too large are truncated along the first axis.
    """
    sample: list[Shape] = []
    for shape in sorted(shapes, key=count, reverse=True):
        rows = min(shape[0], max(1, values // max(1, count(shape[1:]))))
        sample.append((rows, *shape[1:]))
        values -= count(sample[-1])
        if values <= 0:
            break
    return sample


# A milder codec is preferred if its time is at most this factor times the time of the fastest
# codec.
_MILDER_TOLERANCE = 1.1
# Sums without compression are preferred if their time is at most this factor times the time of the
# fastest codec. This factor is larger, because communication is only a part of a step.
_NONE_TOLERANCE = 1.3
# The links count as changed if the time of a small sum has changed by this factor.
_CHANGED = 2.0


@dataclasses.dataclass(frozen=True)
class Auto:
    """Chooses the fastest of several codecs, or no compression, by measurement.

    The argument `compression="auto"` selects this class. Before the first step, all workers sum a
    sample of the model's gradients with each codec, on the processors and connections that the
    training uses. They choose the codec for which the slowest worker needs the least time, or a
    milder codec that is nearly as fast. Compression stays off unless a codec saves at least 23 % of
    the time. A codec is excluded if its sums differ between workers. At the start of each epoch,
    the workers check the speed of their connections. They measure the codecs again if the speed has
    at least doubled or halved.

    Args:
        candidates: the codecs to choose from, sorted from the smallest to the largest loss of
            precision. The default codecs require neither a warm-up nor a different learning rate.
            However, some models reach a higher final loss with `PowerSGD`.

    Raises:
        ValueError: `candidates` is not a tuple of codecs.
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
    """Chooses a codec by measurement. All workers do this together and make the same choice.

    Args:
        auto: the codecs to choose from.
        exchange: the connections of this replica to the other workers.
        device: the replica's device.

    Attributes:
        codec: the chosen codec; None if no compression was chosen, or if no choice has been made
            yet.
        measurement: the measurement on which the choice is based; None if no choice has been made
            yet.
    """

    def __init__(self, auto: Auto, exchange: Exchange, device: str) -> None:
        self.codec: Codec | None = None
        self.measurement: Measurement | None = None
        self._auto, self._exchange, self._device = auto, exchange, device
        self._shapes: list[Shape] = []
        self._candidates: list[Codec] = []

    def make(self, optimizer: Any, shapes: list[Shape]) -> None:
        """Chooses a codec for an optimizer's gradients, unless a choice has already been made.

        Args:
            optimizer: the Keras optimizer. Codecs that cannot be used with this optimizer are
                excluded.
            shapes: the shapes of the gradients.
        """
        if self.measurement is None and shapes:
            self._shapes = shapes
            self._candidates = [c for c in self._auto.candidates if not objection_of(c, optimizer)]
            with tf.init_scope():
                self._measure()

    def reconsider(self) -> bool:
        """Measures and chooses again if the speed of the links has changed.

        Returns:
            Whether the workers have chosen another codec than before.
        """
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
