"""Codecs that encode each value in fewer bits. The native core runs these codecs."""

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
    """A codec that encodes each value in fewer bits.

    The native core encodes values while it sends them.

    If gradients are on a GPU, the core encodes them on the same GPU.

    Each host is responsible for one shard of the gradients. It receives the encoded values of this
    shard from all hosts, decodes them, sums them in float32, encodes the sum, and sends the sum to
    all hosts. A value is therefore encoded twice, regardless of the number of hosts, and all hosts
    receive bitwise identical results.

    Attributes:
        error_feedback: whether to keep the encoding error, and add it to the gradient of the next
            step.
    """

    _payload = "sharded"

    error_feedback = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._encoding  # Validates the settings.

    @property
    @abc.abstractmethod
    def _encoding(self) -> api.Encoding:
        """The encoding with which the core encodes values."""

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
        # The core also sums over the GPUs of a worker, unless the codec keeps state for the
        # worker's sum.
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
            # Each gradient has a fixed leader, so that its encoding error is always on the same
            # worker.
            leaders = exchange.encoded_leaders
            return exchange.encoded_host.sum(gradients, lambda mine: sum_among(leaders, mine))
        return sum_among(self._of_all_gpus(exchange) or exchange.encoded, gradients)


@dataclasses.dataclass(frozen=True)
class BF16(Quantizer):
    """Encodes values as bfloat16, which has the range of float32 and 8 bits of precision.

    A value takes 16 bits, and its relative error is at most 2^-8. Values are summed in float32.

    Args:
        error_feedback: whether to keep the encoding error, and add it to the gradient of the next
            step.

    Source: Kalamkar et al., "A study of BFLOAT16 for deep learning training", 2019.
    """

    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.BFLOAT16)


@dataclasses.dataclass(frozen=True)
class FP16(Quantizer):
    """Encodes values as float16, scaled by a power of two for each block.

    A value `x` is decoded as `half(x / s) * s`. The scale `s` is the power of two for which the
    largest magnitude in the block becomes a number between 2^14 and 2^15. No value overflows then,
    and small gradients keep 11 bits of precision. Values are summed in float32.

    A value takes `16 + 32 / block` bits. Its error is at most 2^-11 of the value, or 2^-39 of the
    block's largest magnitude if that is more.

    Args:
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to keep the encoding error, and add it to the gradient of the next
            step.

    Source: Micikevicius et al., "Mixed precision training", 2018, where scaling also prevents
    underflow.
    """

    block: int = 256
    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.HALF, block=self.block)


@dataclasses.dataclass(frozen=True)
class FP8(Quantizer):
    """Encodes values as 8-bit floating-point numbers ("e4m3"), with a scale for each block.

    An e4m3 number has 4 bits of exponent and 3 bits of mantissa, and its maximum is 448. A value
    `x` is decoded as `e4m3(x * 448 / m) * m / 448`, where `m` is the largest magnitude in the
    block.

    A value takes `8 + 32 / block` bits. Its error is at most 2^-4 of the value, or 2^-18 of the
    block's largest magnitude if that is more.

    Args:
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to keep the encoding error, and add it to the gradient of the next
            step.

    Source: Micikevicius et al., "FP8 formats for deep learning", 2022.
    """

    block: int = 256
    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.FLOAT8, block=self.block)


@dataclasses.dataclass(frozen=True)
class Int8(Quantizer):
    """Encodes values as 8-bit integers, with a scale for each block.

    A value `x` is decoded as `round(x * 127 / m) * m / 127`, where `m` is the largest magnitude in
    the block. A value takes `8 + 32 / block` bits. Its error is at most `m / 254`. With stochastic
    rounding, its error is at most `m / 127`, and is zero on average.

    Args:
        stochastic: whether to round up or down at random, so that the expected value is exact. By
            default, values are rounded to the nearest integer.
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to keep the encoding error, and add it to the gradient of the next
            step.

    Source: Dettmers, "8-bit approximations for parallelism in deep learning", 2016. Blocks and
    stochastic rounding are from Alistarh et al., "QSGD", 2017.
    """

    stochastic: bool = False
    block: int = 256
    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.LEVELS, bits=8, stochastic=self.stochastic, block=self.block)


@dataclasses.dataclass(frozen=True)
class Natural(Quantizer):
    """Rounds each value at random to a power of two. The result is unbiased.

    A value `x` with `2^k <= |x| < 2^(k + 1)` is decoded as `sign(x)` times `2^k` or `2^(k + 1)`.
    The larger power is chosen with probability `|x| / 2^k - 1`, so that the expected value is
    exact. The variance is at most `x^2 / 8`.

    A value takes `8 + 32 / block` bits: its sign, and the difference between its exponent and the
    largest exponent in the block. A value becomes 0 if it is smaller than the block's largest
    magnitude by a factor of about 2^126.

    Args:
        block: the number of values that are encoded relative to the same largest exponent, a
            multiple of 8 up to 4096.
        error_feedback: whether to keep the encoding error, and add it to the gradient of the next
            step.

    Source: Horváth et al., "Natural compression for distributed deep learning", 2019.
    """

    block: int = 256
    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.POWERS, block=self.block)


@dataclasses.dataclass(frozen=True)
class OneBit(Quantizer):
    """Sends only whether a value is negative, and two means for each block.

    A negative value is decoded as the mean of the block's negative values, and any other value as
    the mean of the block's other values. A value takes `1 + 64 / block` bits. The encoding error is
    added to the gradient of the next step. According to the paper, this is essential.

    Args:
        block: the number of values that share the two means, a multiple of 8 up to 4096.
        error_feedback: whether to keep the encoding error, and add it to the gradient of the next
            step.

    Source: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
    distributed training of speech DNNs", 2014. The paper uses two means for each column of a
    matrix.
    """

    block: int = 512
    error_feedback: bool = True

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.TWO_MEANS, block=self.block)


@dataclasses.dataclass(frozen=True)
class QSGD(Quantizer):
    """Rounds each value at random to a multiple of a fraction of the block's norm.

    A value `x` is decoded as `norm * sign(x) * k / s`. `norm` is the Euclidean norm of the block,
    `s = 2^(bits - 1) - 1` is the number of levels, and `k` is the integer below or above
    `s * |x| / norm`. `k` is chosen at random, with the probabilities for which the expected value
    is exact.

    A value takes `bits + 32 / block` bits. The squared error of a block is at most
    `min(n / s^2, sqrt(n) / s)` times its squared norm, where `n` is the number of values in the
    block. In the paper, the levels are then compressed by Elias coding. Here, they have a fixed
    length, so that they can be decoded in parallel.

    Args:
        bits: the number of bits per value: 2, 4 or 8.
        block: the number of values that share a norm, a multiple of 8 up to 4096.
        error_feedback: whether to keep the encoding error, and add it to the gradient of the next
            step.

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
    """Sends only signs. The result for a value is the sign that most hosts have sent.

    The result is 1, -1, or 0 for a tie. It does not depend on the magnitude of the gradient, so
    every weight changes by the learning rate in each step, as with Adam. Start with a learning rate
    that is a hundred times smaller than for SGD. If all values of a block are zero on a host, this
    host does not vote on the block.

    A value takes `1 + 32 / block` bits on the way to the host that counts the votes. The result
    takes `2 + 32 / block` bits on the way back.

    Args:
        block: the number of values that share one flag for "all values are zero", a multiple of 8
            up to 4096.

    Source: Bernstein et al., "signSGD with majority vote is communication efficient and fault
    tolerant", 2019.
    """

    block: int = 1024

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.SIGNS, unit=True, block=self.block)


@dataclasses.dataclass(frozen=True)
class EFSignSGD(Quantizer):
    """Sends the signs of values, and one magnitude for each block. Uses error feedback.

    A block is decoded as `sign(p) * mean(|p|)`, where `p` is the gradient plus the encoding error
    of the previous step. Zero counts as positive. A value takes `1 + 32 / block` bits.

    Args:
        block: the number of values that share a magnitude, a multiple of 8 up to 4096.
        error_feedback: whether to keep the encoding error, and add it to the gradient of the next
            step.

    Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression
    schemes", 2019. The paper uses one magnitude for each layer.
    """

    block: int = 512
    error_feedback: bool = True

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.SIGNS, block=self.block)


@dataclasses.dataclass(frozen=True)
class Signum(Quantizer):
    """Sends only the signs of the momentum. The result is the sign that most hosts have sent.

    For each value `g` of the gradient, the momentum is `u = momentum * u + (1 - momentum) * g`. The
    result is `sign(sum of sign(u))`, which is 1, -1, or 0 for a tie. Every weight changes by the
    learning rate in each step. Start with a learning rate that is a hundred times smaller than for
    SGD, and use an optimizer without momentum.

    A value takes about 1 bit on the way to the host that counts the signs. The result takes about 2
    bits on the way back.

    Args:
        momentum: the factor by which the momentum decreases in each step, in [0, 1).
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
        # Non-finite values become part of the sum, but must not remain in the momentum.
        average.assign(tf.where(tf.math.is_finite(new), new, tf.zeros_like(new)))
        return tf.reshape(new, gradient.shape)


@dataclasses.dataclass(frozen=True)
class TernGrad(Quantizer):
    """Rounds each value at random to -1, 0 or 1 times the block's largest magnitude.

    Values are first clipped to `clip` standard deviations. A value `x` is then decoded as
    `m * sign(x) * b`, where `m` is the largest magnitude in the block, and `b` is 1 with
    probability `|x| / m`, and 0 otherwise. The result is unbiased, apart from the clipping. A value
    takes `2 + 32 / block` bits.

    Args:
        clip: the largest magnitude that is not clipped, in standard deviations of the block. The
            standard deviation is computed about zero instead of the mean. 0 disables clipping.
        block: the number of values that share a scale, a multiple of 8 up to 4096.
        error_feedback: whether to keep the encoding error, and add it to the gradient of the next
            step.

    Source: Wen et al., "TernGrad: Ternary gradients to reduce communication in distributed deep
    learning", 2017. The paper uses one scale for each layer.
    """

    clip: float = 2.5
    block: int = 512
    error_feedback: bool = False

    @property
    def _encoding(self) -> api.Encoding:
        return api.Encoding(api.LEVELS, bits=2, stochastic=True, clip=self.clip, block=self.block)
