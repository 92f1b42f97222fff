"""Codecs that send only some of a gradient's values."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.comm.tracing import GraphSpan
from tfdist._src.compression.codecs.codec import HierarchicalCodec
from tfdist._src.compression.transport import Exchange, Gradient, HostLeaders, Shape, count

_ROW_BITS = 64


@dataclasses.dataclass(frozen=True)
class Sparsifier(HierarchicalCodec):
    """A codec that sends some of each host's values, together with their indices.

    Each host selects values of its own gradients. All hosts receive all selected values and sum
    them in the same order. A non-finite value counts as larger than any other value, and is sent
    unchanged.

    Attributes:
        error_feedback: whether to keep the values that are not sent, and add them to the gradient
            of the next step.
    """

    _payload = "gathered"

    error_feedback = True

    @abc.abstractmethod
    def _density(self, step: Any) -> Any:
        """Returns the fraction of a gradient's values that is sent in a step.

        Returns None if the fraction depends on the values.

        Args:
            step: the number of compressed steps before this one; None for the fraction in later
                steps, which no longer changes.
        """

    def bits_per_value(self, shape: Shape) -> float:
        density = self._density(None)
        if density is None:
            return _ROW_BITS
        values = max(1, count(shape))
        return _ROW_BITS * float(_chosen(density, values)) / values

    def _runs_on(self, exchange: Exchange, device: str) -> str:
        return (self._leaders_in(exchange) or exchange.workers).device

    def _leaders_in(self, exchange: Exchange) -> CoreCommunicator | None:
        return exchange.encoded_leaders

    def _host_in(self, exchange: Exchange) -> HostLeaders:
        return exchange.encoded_host

    def _devices(self, exchange: Exchange) -> HostLeaders:
        return exchange.encoded_devices

    def compresses(self, shape: Shape) -> bool:
        return count(shape) < 2**31

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"error": (count(shape),)} if self.error_feedback else {}

    def _sum_of_hosts(
        self, leaders: CoreCommunicator, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        sums: list[Any] = [None] * len(gradients)
        with tf.device(leaders.device):
            for bucket in leaders.plan([g.value for g in gradients]):
                some = [gradients[i] for i in bucket]
                _, hosts = leaders.place()
                rows = leaders.all_gather(self._select(some, step, hosts, leaders.name))
                totals = scatter(rows, [g.shape for g in some], leaders.name)
                for i, total in zip(bucket, totals, strict=True):
                    sums[i] = total
        return sums

    def _select(
        self, gradients: Sequence[Gradient], step: tf.Tensor, hosts: Any, communicator: str = ""
    ) -> tf.Tensor:
        """Selects the values to send, and keeps all other values in the error variables.

        Args:
            gradients: the gradients, summed over this host.
            step: the number of compressed steps before this one.
            hosts: the number of hosts.
            communicator: the name of the communicator that connects the hosts. Needed only if the
                gradients are on a GPU.

        Returns:
            A float32 tensor with two columns and one row for each selected value. The first column
            contains the index of the value, counted over all gradients. It is an int32 with its
            bits reinterpreted as float32. The second column contains the value itself.
        """
        scales = [self._scale(g, hosts) for g in gradients]
        # On the CPU, the number of rows is known without waiting for a GPU.
        with tf.device("CPU:0"):
            density = self._density(step)
            counts = [0 if density is None else _chosen(density, count(g.shape)) for g in gradients]
            counts, scales = tf.cast(tf.stack(counts), tf.int64), tf.stack(scales)
        return native.load_ops().tfdist_select(
            tensors=[g.value for g in gradients],
            errors=[g.kept["error"].handle for g in gradients] if self.error_feedback else [],
            counts=counts,
            scales=scales,
            communicator=communicator,
            **self._selection(gradients),
        )

    def _scale(self, gradient: Gradient, hosts: Any) -> Any:
        """Returns the factor by which a gradient is multiplied before values are selected."""
        return 1.0

    def _selection(self, gradients: Sequence[Gradient]) -> dict[str, Any]:
        """Returns those arguments of the operation `TfdistSelect` that depend on the codec."""
        return {"momenta": []}


def scatter(rows: tf.Tensor, shapes: Sequence[Shape], communicator: str = "") -> list[tf.Tensor]:
    """Converts the selected values of all hosts to the sums of gradients.

    Args:
        rows: the concatenated results of `Sparsifier._select` on all hosts.
        shapes: the shapes of the gradients.
        communicator: as for `Sparsifier._select`.

    Returns:
        A tensor for each shape. It contains zeros where no host has selected a value.
    """
    return list(
        native.load_ops().tfdist_scatter(
            rows=rows,
            N=len(shapes),
            shapes=[tf.TensorShape(s).as_proto() for s in shapes],
            communicator=communicator,
        )
    )


def _chosen(density: Any, values: int) -> Any:
    """Returns the number of values to send: at least one, unless the gradient is empty."""
    if isinstance(density, float):
        return max(1, round(density * values)) if values else 0
    wanted = tf.cast(tf.round(tf.cast(density, tf.float64) * values), tf.int64)
    return tf.clip_by_value(wanted, min(1, values), values)


@dataclasses.dataclass(frozen=True)
class TopK(Sparsifier):
    """Sends the values with the largest magnitudes of each gradient, and their indices.

    Of a gradient's `n` values, each host sends `ratio * n`, but at least one. Each of them takes 64
    bits. The other values are added to the gradient of the next step. Without this error feedback,
    training does not converge.

    Args:
        ratio: the fraction of the values to send, in (0, 1].
        error_feedback: whether to keep the values that are not sent, and add them to the gradient
            of the next step.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent", 2017;
    Stich et al., "Sparsified SGD with memory", 2018.
    """

    ratio: float = 0.01
    error_feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("`ratio` must be in (0, 1].", self.ratio, holds=0 < self.ratio <= 1)

    def _density(self, step: Any) -> Any:
        return float(self.ratio)


@dataclasses.dataclass(frozen=True)
class Threshold(Sparsifier):
    """Sends the values with at least a given magnitude, and their indices.

    Each value that is sent takes 64 bits. The number of these values varies from step to step. The
    other values are added to the gradient of the next step, so that every value is sent eventually.

    Args:
        threshold: the smallest magnitude that is sent, a positive number. A suitable threshold
            depends on the magnitudes of the gradients.
        error_feedback: whether to keep the values that are not sent, and add them to the gradient
            of the next step.

    Source: Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015.
    The paper sends the threshold, with a sign, instead of the value.
    """

    _has_fixed_size = False

    threshold: float = 1e-3
    error_feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = bool(0 < np.float32(self.threshold) < np.inf)
        self._check("`threshold` must be a positive float32.", self.threshold, holds=fits)

    def _density(self, step: Any) -> Any:
        return None

    def _selection(self, gradients: Sequence[Gradient]) -> dict[str, Any]:
        return {"momenta": [], "threshold": self.threshold}


@dataclasses.dataclass(frozen=True)
class RandomK(HierarchicalCodec):
    """Sends values at random positions, which are the same on all workers.

    A gradient with `n` values is divided into `ratio * n` equal parts, and one value of each part
    is sent. The value takes 32 bits. Indices need not be sent, because all workers draw the same
    positions. The other values are added to the gradient of the next step. Without error feedback,
    each value is instead multiplied by the size of its part, so that the sum is unbiased.

    Args:
        ratio: the fraction of the values to send, in (0, 1].
        error_feedback: whether to keep the values that are not sent, and add them to the gradient
            of the next step.

    Source: Stich et al., "Sparsified SGD with memory", 2018. The paper draws values from the whole
    gradient, instead of one from each part.
    """

    _payload = "summed"
    _on_host = False

    ratio: float = 0.01
    error_feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("`ratio` must be in (0, 1].", self.ratio, holds=0 < self.ratio <= 1)

    def bits_per_value(self, shape: Shape) -> float:
        return 32 * self._chosen(count(shape)) / max(1, count(shape))

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"error": (count(shape),)} if self.error_feedback else {}

    def _sum_of_hosts(
        self, leaders: CoreCommunicator, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        span = GraphSpan([g.value for g in gradients])
        places = [self._places(count(g.shape), step, g.number) for g in gradients]
        sent = [self._take(g, *p) for g, p in zip(gradients, places, strict=True)]
        span.end("compression", "encode by randomk", sent)
        sums = leaders.all_reduce(sent)
        span = GraphSpan(sums)
        totals = [
            tf.reshape(tf.scatter_nd(p[:, None], s, [count(g.shape)]), g.shape)
            for g, s, (p, _) in zip(gradients, sums, places, strict=True)
        ]
        span.end("compression", "decode by randomk", totals)
        return totals

    def _places(self, values: int, step: tf.Tensor, number: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Draws the positions of the values to send in a step.

        Args:
            values: the number of values in the gradient.
            step: an int64 scalar, the number of compressed steps before this one.
            number: the index of the gradient among the optimizer's gradients.

        Returns:
            The indices of the values in ascending order, and for each index the size of the part to
            which it belongs. Both are int64 vectors.
        """
        parts = self._chosen(values)
        bounds = tf.range(parts + 1, dtype=tf.int64) * values // max(1, parts)
        sizes = bounds[1:] - bounds[:-1]
        # The algorithm Philox draws the same numbers on every kind of device.
        bits = tf.random.stateless_uniform(
            [parts], [step, tf.constant(number, tf.int64)], None, None, tf.uint32, alg="philox"
        )
        return bounds[:-1] + tf.cast(bits, tf.int64) % sizes, sizes

    def _take(self, gradient: Gradient, places: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        values = tf.reshape(gradient.value, [-1])

        def take() -> tf.Tensor:
            if not self.error_feedback:
                return tf.gather(values, places) * tf.cast(sizes, tf.float32)
            error = gradient.kept["error"]
            error.assign_add(values)
            taken = error.sparse_read(places)
            zeros = tf.zeros_like(taken)
            tf.raw_ops.ResourceScatterUpdate(resource=error.handle, indices=places, updates=zeros)
            return taken

        # If any value is not finite, the host sends only NaN, so that the sum shows it, and does
        # not change the error variable.
        finite = tf.reduce_all(tf.math.is_finite(values))
        return tf.cond(finite, take, lambda: tf.fill(tf.shape(places), float("nan")))

    def _chosen(self, values: int) -> int:
        return max(1, round(self.ratio * values)) if values else 0


_RAMP = 4  # the number of stages; each stage sends a quarter of the values of the previous stage


@dataclasses.dataclass(frozen=True)
class DGC(Sparsifier):
    """Sends the largest values of each host's accumulated momentum, and their indices.

    For a gradient `g`, each host computes the momentum `u = momentum * u + g`, and accumulates it
    in `v = v + u`. The host sends the values of `v` with the largest magnitudes, and each of them
    takes 64 bits. At the positions of these values, `u` and `v` are then set to zero. The paper
    calls this momentum correction and momentum factor masking.

    Because the codec itself applies momentum, use `keras.optimizers.SGD` without momentum.
    Gradients that are not compressed, for example during the warm-up, are then applied without
    momentum.

    Args:
        ratio: the fraction of the values to send after the first `ramp_steps` steps, in (0, 1].
        momentum: the factor by which the momentum decreases in each step, in [0, 1).
        clip_norm: if given, each host scales a gradient so that its norm is at most
            `clip_norm / sqrt(hosts)`, where `hosts` is the number of hosts, before it accumulates
            the gradient.
        ramp_steps: the number of steps after the warm-up in which a larger fraction of the values
            is sent. The fraction decreases in four equal stages: 1/4, 1/16, 1/64, 1/256.

    Source: Lin et al., "Deep gradient compression: reducing the communication bandwidth for
    distributed training", 2018.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip_norm: float | None = None
    ramp_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("`ratio` must be in (0, 1].", self.ratio, holds=0 < self.ratio <= 1)
        self._check("`momentum` must be in [0, 1).", self.momentum, holds=0 <= self.momentum < 1)
        positive = self.clip_norm is None or self.clip_norm > 0
        self._check("`clip_norm` must be positive or None.", self.clip_norm, holds=positive)
        self._check("`ramp_steps` must be >= 0.", self.ramp_steps, holds=self.ramp_steps >= 0)

    def _objection(self, optimizer: Any) -> str:
        has_momentum = getattr(optimizer, "momentum", 0) or hasattr(optimizer, "beta_1")
        if not self.momentum or not has_momentum:
            return ""
        return (
            "DGC applies momentum itself, so the optimizer must not. Received: "
            f"{type(optimizer).__name__}. Train with keras.optimizers.SGD without momentum, or use "
            "tfdist.compression.DGC(momentum=0)."
        )

    def _density(self, step: Any) -> Any:
        if step is None or not self.ramp_steps:
            return float(self.ratio)
        stage = step * _RAMP // self.ramp_steps
        falling = tf.pow(0.25, tf.cast(tf.clip_by_value(stage, 0, _RAMP) + 1, tf.float32))
        return tf.where(stage < _RAMP, tf.maximum(falling, self.ratio), self.ratio)

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        return {"error": (count(shape),), "momentum": (count(shape),)}

    def _scale(self, gradient: Gradient, hosts: Any) -> Any:
        if self.clip_norm is None:
            return super()._scale(gradient, hosts)
        norm = tf.norm(gradient.value)
        limit = tf.cast(self.clip_norm / tf.cast(hosts, tf.float64) ** 0.5, tf.float32)
        scale = limit / tf.maximum(norm, limit)
        # A gradient with NaN is not scaled. NaN values are sent in any case, but must not turn the
        # other values into NaN.
        return tf.where(tf.math.is_nan(norm), 1.0, scale)

    def _selection(self, gradients: Sequence[Gradient]) -> dict[str, Any]:
        momenta = [g.kept["momentum"].handle for g in gradients]
        return {"momenta": momenta, "factor": self.momentum}
