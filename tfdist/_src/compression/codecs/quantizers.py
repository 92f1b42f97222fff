"""Codecs that send fewer bits per value; they run in the core."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist._src.comm.device_communicator import compressed_all_reduce
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.compression.codecs.codec import Codec
from tfdist._src.compression.transport import Exchange, Gradient, HostLeaders, Shape, count
from tfdist._src.native import api


@dataclasses.dataclass(frozen=True)
class Quantizer(Codec):
    """A codec that runs in the core: values take fewer bits, and are encoded while being sent.

    The core encodes the gradients of a GPU on this GPU.

    Each host decodes the values of its shard of the gradients, sums them in float32, encodes the
    sum and sends it to all hosts. So a value is encoded twice, for any number of hosts, and the
    results are bitwise equal on all hosts.

    Attributes:
        error_feedback: whether to add the encoding error to the next step's gradient.
    """

    _payload = "sharded"

    error_feedback = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._encoding  # Validates the settings.

    @property
    @abc.abstractmethod
    def _encoding(self) -> api.Encoding:
        """The encoding of values."""

    @property
    def _follows_hosts(self) -> bool:
        return self.error_feedback

    def bits_per_value(self, shape: Shape) -> float:
        return self._encoding.bits_per_value

    def _runs_on(self, exchange: Exchange, device: str) -> str:
        if self.error_feedback:
            return (exchange.encoded_leaders or exchange.workers).device
        return exchange.encoded.device

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"error": (count(shape),)} if self.error_feedback else {}

    def _devices(self, exchange: Exchange) -> HostLeaders:
        # The core also sums over GPUs, unless the codec keeps state for their sum.
        return HostLeaders() if self._of_all_gpus(exchange) else exchange.encoded_devices

    def _of_all_gpus(self, exchange: Exchange) -> CoreCommunicator | None:
        return None if self.kept((1,)) else exchange.of_all_gpus

    def sum(
        self, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        def sum_among(group: CoreCommunicator | None, some: Sequence[Gradient]) -> list[tf.Tensor]:
            assert group is not None
            return compressed_all_reduce(
                group,
                [g.value for g in some],
                self._encoding,
                [g.kept["error"] for g in some] if self.error_feedback else [],
                step,
                within_hosts=exchange.within_hosts,
            )

        if self.error_feedback:
            # The error of a gradient stays with its leader, regardless of the other gradients.
            leaders = exchange.encoded_leaders
            return exchange.encoded_host.sum(gradients, lambda mine: sum_among(leaders, mine))
        return sum_among(self._of_all_gpus(exchange) or exchange.encoded, gradients)


@dataclasses.dataclass(frozen=True)
class BF16(Quantizer):
    """bfloat16: the range of float32, with 8 bits of precision.

    Values are summed in float32. 16 bits per value; the relative error of a value is at most 2^-8.

    Args:
        error_feedback: whether to add the encoding error to the next step's gradient.

    Source: Kalamkar et al., "A study of BFLOAT16 for deep learning training", 2019.
    """

    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.BFLOAT16)


@dataclasses.dataclass(frozen=True)
class FP16(Quantizer):
    """float16 with a power-of-two scale per block: `half(x / s) * s`.

    A block's largest value is scaled to between 2^14 and 2^15, so that nothing overflows and small
    gradients keep 11 bits of precision; values are summed in float32.

    16 + 32 / block bits per value; the error of a value is at most 2^-11 of the value, or 2^-39 of
    the block's largest value.

    Args:
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to add the encoding error to the next step's gradient.

    Source: Micikevicius et al., "Mixed precision training", 2018 (scaling against underflow).
    """

    block: int = 256
    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.HALF, block=self.block)


@dataclasses.dataclass(frozen=True)
class FP8(Quantizer):
    """8 bits, 4 of exponent and 3 of mantissa ("e4m3"), with a scale per block.

    A block's largest magnitude `m` becomes 448, the format's maximum:
    `e4m3(x * 448 / m) * m / 448`.

    8 + 32 / block bits per value; the error of a value is at most 2^-4 of the value, or 2^-18 of
    the block's largest value.

    Args:
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to add the encoding error to the next step's gradient.

    Source: Micikevicius et al., "FP8 formats for deep learning", 2022.
    """

    block: int = 256
    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.FLOAT8, block=self.block)


@dataclasses.dataclass(frozen=True)
class Int8(Quantizer):
    """8-bit integers with a scale per block: `round(x * 127 / m) * m / 127`.

    `m` is the block's largest magnitude. 8 + 32 / block bits per value; the error of a value is at
    most `m / 254`, or with stochastic rounding at most `m / 127` and zero on average.

    Args:
        stochastic: whether to round up or down at random, without bias, instead of to the nearest
            integer.
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to add the encoding error to the next step's gradient.

    Source: Dettmers, "8-bit approximations for parallelism in deep learning", 2016 (with blocks
    and stochastic rounding as in Alistarh et al., "QSGD", 2017).
    """

    stochastic: bool = False
    block: int = 256
    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.LEVELS, bits=8, stochastic=self.stochastic, block=self.block)


@dataclasses.dataclass(frozen=True)
class Natural(Quantizer):
    """Unbiased: `sign(x)` times the power of two below or above `|x|`.

    The power above is chosen with the probability that makes the mean exact: `|x| / 2^k - 1` for
    `2^k <= |x| < 2^(k + 1)`. The variance is at most `x^2 / 8`. 8 + 32 / block bits per value: a
    sign, and the difference of the exponent from the largest in the block. Values smaller than the
    largest by a factor of 2^126 become 0.

    Args:
        block: the number of values that share a largest exponent, a multiple of 8 up to 4096.
        error_feedback: whether to add the encoding error to the next step's gradient.

    Source: Horváth et al., "Natural compression for distributed deep learning", 2019.
    """

    block: int = 256
    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.POWERS, block=self.block)


@dataclasses.dataclass(frozen=True)
class OneBit(Quantizer):
    """Replaces values by the mean of a block's negative or of its non-negative values.

    1 + 64 / block bits per value. The encoding error is added to the next step's gradient; the
    paper found this to be essential.

    Args:
        block: the number of values that share the two means, a multiple of 8 up to 4096.
        error_feedback: whether to add the encoding error to the next step's gradient.

    Source: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs", 2014 (with two means per matrix column).
    """

    block: int = 512
    error_feedback: bool = True

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.TWO_MEANS, block=self.block)


@dataclasses.dataclass(frozen=True)
class QSGD(Quantizer):
    """Unbiased: `norm * sign(x) * k / s`, where `k` is the integer below or above `s * |x| / norm`.

    The integer above is chosen with the probability that makes the mean exact. There are
    `s = 2^(bits - 1) - 1` levels and one norm per block. bits + 32 / block bits per value; the
    squared error of a block is at most `min(n / s^2, sqrt(n) / s)` times its squared norm, where
    `n` is the number of values in a block. (The paper then applies Elias coding to the levels; here
    they have a fixed length and can be decoded in parallel.)

    Args:
        bits: the bits per value, 2, 4 or 8.
        block: the number of values that share a norm, a multiple of 8 up to 4096.
        error_feedback: whether to add the encoding error to the next step's gradient.

    Source: Alistarh et al., "QSGD: Communication-efficient SGD via gradient quantization and
    encoding", 2017.
    """

    bits: int = 8
    block: int = 512
    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(
            api.LEVELS, bits=self.bits, stochastic=True, euclidean=True, block=self.block
        )


@dataclasses.dataclass(frozen=True)
class SignSGD(Quantizer):
    """The majority of the hosts' signs: 1, -1, or 0 for a tie.

    The result is not a gradient but a direction of magnitude 1, regardless of the gradient's
    magnitude. Every weight therefore changes by the learning rate, as with Adam; start with a rate
    a hundred times smaller than for SGD. A host does not vote on a block that is all zeros.

    1 + 32 / block bits per value to the host that counts the votes, and 2 + 32 / block bits back.

    Args:
        block: the number of values that share an all-zeros flag, a multiple of 8 up to 4096.

    Source: Bernstein et al., "signSGD with majority vote is communication efficient and fault
    tolerant", 2019.
    """

    block: int = 1024

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.SIGNS, unit=True, block=self.block)


@dataclasses.dataclass(frozen=True)
class EFSignSGD(Quantizer):
    """`sign(p) * mean(|p|)` per block, where `p` is the gradient plus the earlier encoding error.

    1 + 32 / block bits per value. Zero counts as positive.

    Args:
        block: the number of values that share a magnitude, a multiple of 8 up to 4096.
        error_feedback: whether to add the encoding error to the next step's gradient.

    Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
    schemes", 2019 (with one magnitude per layer).
    """

    block: int = 512
    error_feedback: bool = True

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.SIGNS, block=self.block)


@dataclasses.dataclass(frozen=True)
class Signum(Quantizer):
    """The majority sign of each value's momentum; the magnitude is lost.

    `u = momentum * u + (1 - momentum) * g`, and the result is `sign(sum of sign(u))`: 1, -1, or 0
    for a tie. Every weight changes by the learning rate, so start with a rate a hundred times
    smaller than for SGD, and use an optimizer without momentum.

    About 1 bit per value to the host that counts the signs, and 2 bits back.

    Args:
        momentum: the momentum, in [0, 1).
        block: the number of values that are encoded together, a multiple of 8 up to 4096.

    Source: Bernstein et al., "signSGD with majority vote is communication efficient and fault
    tolerant", 2019.
    """

    _kept_by_all = True

    momentum: float = 0.9
    block: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("`momentum` must be in [0, 1).", self.momentum, holds=0 <= self.momentum < 1)

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.SIGNS, unit=True, block=self.block)

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"average": (count(shape),)}

    def sum(
        self, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        with tf.device(exchange.encoded.device):
            averaged = [dataclasses.replace(g, value=self._average(g)) for g in gradients]
        return super().sum(exchange, averaged, step)

    def _average(self, gradient: Gradient) -> tf.Tensor:
        average = gradient.kept["average"]
        new = self.momentum * average + (1 - self.momentum) * tf.reshape(gradient.value, [-1])
        # Non-finite values propagate to the sum, but are not kept.
        average.assign(tf.where(tf.math.is_finite(new), new, tf.zeros_like(new)))
        return tf.reshape(new, gradient.shape)


@dataclasses.dataclass(frozen=True)
class TernGrad(Quantizer):
    """Unbiased except for clipping: `m * sign(x) * b`, where `b` is 1 with probability `|x| / m`.

    `m` is the largest magnitude of a block, after values are clipped to `clip` standard deviations.
    2 + 32 / block bits per value.

    Args:
        clip: the clipping bound in standard deviations, computed about zero; 0 for no clipping.
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to add the encoding error to the next step's gradient.

    Source: Wen et al., "TernGrad: Ternary gradients to reduce communication in distributed deep
    learning", 2017 (with one scale per layer).
    """

    clip: float = 2.5
    block: int = 512
    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.LEVELS, bits=2, stochastic=True, clip=self.clip, block=self.block)
