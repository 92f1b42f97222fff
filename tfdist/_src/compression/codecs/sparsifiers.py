"""Codecs that send a few values of a gradient with their indices."""

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
    """A codec that selects values on each host independently, and sends them with their indices.

    All hosts sum the values in the same order. Non-finite values count as the largest and are sent
    unchanged.

    Attributes:
        error_feedback: whether to add the values that are not sent to the next step's gradient.
    """

    _payload = "gathered"

    error_feedback = True

    @abc.abstractmethod
    def _density(self, step: Any) -> Any:
        """The fraction of a gradient's values that is sent in a step; None if it varies."""

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
        """Selects the values to send, and stores the others in the error variables.

        Args:
            gradients: the gradients of this host.
            step: the number of compressed steps so far.
            hosts: the number of hosts.
            communicator: the name of the hosts' communicator; for gradients on a GPU.

        Returns:
            A float32 tensor with a row for each selected value: first its index, counted over all
            gradients, as the bits of an int32; then the value.
        """
        scales = [self._scale(g, hosts) for g in gradients]
        with tf.device("CPU:0"):  # So that the number of rows is known without waiting for a GPU.
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
        """The factor by which a gradient is multiplied before values are selected."""
        return 1.0

    def _selection(self, gradients: Sequence[Gradient]) -> dict[str, Any]:
        """Further arguments of `TfdistSelect`."""
        return {"momenta": []}


def scatter(rows: tf.Tensor, shapes: Sequence[Shape], communicator: str = "") -> list[tf.Tensor]:
    """Sums rows into gradients.

    Args:
        rows: the rows of all hosts, as from `Sparsifier._select`.
        shapes: the shapes of the gradients.
        communicator: as for `Sparsifier._select`.

    Returns:
        A gradient for each shape; zero where no row has a value.
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
    """The number of values to send, at least one."""
    if isinstance(density, float):
        return max(1, round(density * values)) if values else 0
    wanted = tf.cast(tf.round(tf.cast(density, tf.float64) * values), tf.int64)
    return tf.clip_by_value(wanted, min(1, values), values)


@dataclasses.dataclass(frozen=True)
class TopK(Sparsifier):
    """The values of largest magnitude of each gradient, and their indices.

    Exactly `ratio * n` of `n` values, at least one, 64 bits each. The other values are added to the
    next step's gradient; training does not converge without this.

    Args:
        ratio: the fraction of the values that is sent, in (0, 1].
        error_feedback: whether to add the values that are not sent to the next step's gradient.

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
    """All values with at least a given magnitude, and their indices.

    64 bits each; their number varies from step to step. The other values are added to the next
    step's gradient, so that every value is sent eventually.

    Args:
        threshold: a positive magnitude. A suitable value depends on the size of the gradients.
        error_feedback: whether to add the values that are not sent to the next step's gradient.

    Source: Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015
    (which sends the threshold instead of the value).
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
    """Values at random positions, the same on all workers, so that no indices need to be sent.

    Sends one value, 32 bits, of each of `ratio * n` equal parts of a gradient. The other values are
    added to the next step's gradient; without error feedback, a value is multiplied by the size of
    its part, so that the sum is unbiased.

    Args:
        ratio: the fraction of the values that is sent, in (0, 1].
        error_feedback: whether to add the values that are not sent to the next step's gradient.

    Source: Stich et al., "Sparsified SGD with memory", 2018 (with arbitrary values instead of one
    per part; all are equally likely to be sent).
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
        """Selects the values of a gradient that are sent in a step.

        Args:
            values: the number of values.
            step: the step, an int64 scalar.
            number: the gradient's number.

        Returns:
            The indices of the values in ascending order, int64, and the sizes of their parts,
            int64.
        """
        parts = self._chosen(values)
        bounds = tf.range(parts + 1, dtype=tf.int64) * values // max(1, parts)
        sizes = bounds[1:] - bounds[:-1]
        # Philox draws the same numbers on every kind of device.
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

        # Non-finite values propagate to the sum, selected or not, but are not kept.
        finite = tf.reduce_all(tf.math.is_finite(values))
        return tf.cond(finite, take, lambda: tf.fill(tf.shape(places), float("nan")))

    def _chosen(self, values: int) -> int:
        return max(1, round(self.ratio * values)) if values else 0


_RAMP = 4  # stages, each sending a quarter of the previous one


@dataclasses.dataclass(frozen=True)
class DGC(Sparsifier):
    """The largest values of each host's accumulated momentum, and their indices.

    `u = momentum * u + g; v = v + u`; the largest values of `v` are sent, 64 bits each, and `u` and
    `v` are zeroed there (momentum correction and factor masking). Since the codec applies momentum,
    use `keras.optimizers.SGD` without it. Exact gradients, including the gradients of warm-up
    steps, then have no momentum.

    Args:
        ratio: the fraction of the values that is sent after the ramp, in (0, 1].
        momentum: the momentum, in [0, 1).
        clip_norm: clips the norm of each gradient to `clip_norm / sqrt(hosts)` before it is
            accumulated; None for no clipping.
        ramp_steps: the number of steps after the warm-up over which the fraction decreases: 1/4,
            1/16, 1/64, 1/256.

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
        # NaN values are sent anyway; they must not affect the others.
        return tf.where(tf.math.is_nan(norm), 1.0, scale)

    def _selection(self, gradients: Sequence[Gradient]) -> dict[str, Any]:
        momenta = [g.kept["momentum"].handle for g in gradients]
        return {"momenta": momenta, "factor": self.momentum}
