"""The base classes of all codecs."""

import abc
import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.compression.transport import Exchange, Gradient, HostLeaders, Shape

_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (numbers.Integral,),
    "float": (numbers.Real,),
    "None": (type(None),),
}


def check_types(settings: Any) -> None:
    """Checks the numeric and boolean fields of a dataclass against its annotations.

    Raises:
        ValueError: a value has a different type.
    """
    for field in dataclasses.fields(settings):
        # A string, if the class's module postpones the evaluation of annotations.
        annotation = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        names = annotation.split(" | ")
        if not set(names) <= set(_KINDS):
            continue
        value = getattr(settings, field.name)
        kinds = tuple(kind for name in names for kind in _KINDS[name])
        if not isinstance(value, kinds) or (isinstance(value, bool) and "bool" not in names):
            raise ValueError(
                f"{type(settings).__name__}: `{field.name}` must be of type {annotation}. "
                f"Received: {value!r}."
            )


@dataclasses.dataclass(frozen=True)
class Codec(abc.ABC):
    """An encoding of gradients sent between hosts.

    Codecs are settings: frozen, and compared by value. State that persists from step to step is in
    separate variables.

    To write a codec, derive a frozen dataclass from this class, and define `bits_per_value` and
    `sum`; also `kept` and `first` if it has state.

    Args:
        warmup_steps: the number of initial steps of the optimizer that are exact.

    Example:
        ```python
        @dataclasses.dataclass(frozen=True)
        class Rounded(tfdist.compression.Codec):  # bfloat16, with error feedback
            def bits_per_value(self, shape):
                return 16

            def kept(self, shape):
                return {"error": shape}

            def sum(self, exchange, gradients, step):
                def sum_of_hosts(mine):
                    sent = []
                    for gradient in mine:
                        error = gradient.kept["error"]
                        wanted = gradient.value + error
                        sent.append(tf.cast(wanted, tf.bfloat16))
                        error.assign(wanted - tf.cast(sent[-1], tf.float32))
                    leaders = exchange.leaders.name
                    sums = tfdist.collective.all_reduce(sent, communicator=leaders)
                    return [tf.cast(total, tf.float32) for total in sums]

                return exchange.host.sum(gradients, sum_of_hosts)
        ```
    """

    # How encoded values are summed. "sharded": each host decodes and sums a shard of the gradients
    # in float32, encodes the sum and sends it to all hosts. "summed": the encoded values themselves
    # are summed, exactly. "gathered": every host receives the encoded values of all hosts.
    _payload: ClassVar[str]
    # Whether it runs on the CPU rather than on the gradients' device.
    _on_host: ClassVar[bool] = True
    # Whether every worker keeps state for each gradient, rather than only the host leader that
    # exchanges it.
    _kept_by_all: ClassVar[bool] = False
    # Whether `bits_per_value` is exact, rather than an upper bound.
    _has_fixed_size: ClassVar[bool] = True

    warmup_steps: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_types(self)
        self._check("`warmup_steps` must be >= 0.", self.warmup_steps, holds=self.warmup_steps >= 0)

    @property
    def _follows_hosts(self) -> bool:
        """Whether its operations depend on how the workers are divided among hosts."""
        return True

    @abc.abstractmethod
    def bits_per_value(self, shape: Shape) -> float:
        """The bits sent per value of a gradient of this shape before it is summed.

        Uncompressed float32 values take 32 bits.
        """

    def _objection(self, optimizer: Any) -> str:
        """The reason why this codec cannot be used with a Keras optimizer; "" if it can."""
        return ""

    def compresses(self, shape: Shape) -> bool:
        """Whether a gradient of this shape becomes smaller."""
        return True

    def _runs_on(self, exchange: Exchange, device: str) -> str:
        """The device that it runs on and keeps its state on.

        Args:
            exchange: the route to the other workers.
            device: the gradients' device.
        """
        return exchange.workers.device if self._on_host else device

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        """The shapes, by name, of the float32 state kept for a gradient from step to step."""
        return {}

    def first(self, name: str, shape: Shape) -> tf.Tensor:
        """The initial value of the state with a name, the same on all workers."""
        return tf.zeros(shape, tf.float32)

    def _devices(self, exchange: Exchange) -> HostLeaders:
        """The division of gradients among a worker's devices, which sum gradients before `sum`.

        Args:
            exchange: the route to the other workers.

        Returns:
            The exchange's division; `HostLeaders()` if `sum` takes the gradients of each device.
        """
        return exchange.devices

    @abc.abstractmethod
    def sum(
        self, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Sums gradients over all workers.

        The workers of a host first sum their gradients exactly, and divide the sums among
        themselves. For each gradient, one worker per host then exchanges the host's sum, and keeps
        the state.

        Args:
            exchange: the route to the other workers. `exchange.host.sum(gradients, function)` sums
                within the host, and calls `function` with the sums that this worker exchanges.
                `function` returns the totals over all hosts, which `exchange.host.sum` returns on
                all workers. `exchange.leaders.name` names the communicator of the workers that
                exchange the same sums.
            gradients: in the order of the forward pass. Each has `value`, a float32 tensor, its
                static `shape`, `number`, its index among the optimizer's gradients, and `kept`, its
                state: variables by name, which this method updates.
            step: the number of compressed steps so far, an int64 scalar, the same on all workers.

        Returns:
            The sums, bitwise identical on all workers.
        """

    def _check(self, rule: str, value: Any, *, holds: bool) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: {rule} Received: {value!r}.")


def follows_hosts(codec: Codec) -> bool:
    """Whether a codec's operations depend on how the workers are divided among hosts."""
    return codec._follows_hosts


def has_fixed_size(codec: Codec) -> bool:
    """Whether `bits_per_value` of a codec is exact, rather than an upper bound."""
    return codec._has_fixed_size


def objection_of(codec: Codec, optimizer: Any) -> str:
    """The reason why a codec cannot be used with a Keras optimizer; "" if it can."""
    return codec._objection(optimizer)


def leads(codec: Codec, exchange: Exchange, number: int) -> bool:
    """Whether this replica keeps a codec's state of a gradient."""
    return (exchange.devices if codec._kept_by_all else exchange).leads(number)


def device_of(codec: Codec, exchange: Exchange, device: str) -> str:
    """The device that a codec runs on and keeps its state on.

    Args:
        codec: the codec.
        exchange: the route to the other workers.
        device: the gradients' device.
    """
    return codec._runs_on(exchange, device)


def sum_of_replicas(
    codec: Codec, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
) -> list[tf.Tensor]:
    """Sums over the devices of this worker, and by `codec.sum` over all workers."""
    devices = codec._devices(exchange)
    return devices.sum(gradients, lambda mine: codec.sum(exchange, mine, step))


@dataclasses.dataclass(frozen=True)
class HierarchicalCodec(Codec):
    """A codec that compresses the sums of hosts, each exchanged by one leader per host."""

    def _leaders_in(self, exchange: Exchange) -> CoreCommunicator | None:
        """The communicator of the leaders; None for a worker that leads no gradients."""
        return exchange.leaders

    def _host_in(self, exchange: Exchange) -> HostLeaders:
        """The division of gradients among the workers of a host."""
        return exchange.host

    @abc.abstractmethod
    def _sum_of_hosts(
        self, leaders: CoreCommunicator, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Sums over the leaders of the same gradients, one per host.

        Args:
            leaders: the leaders' communicator.
            gradients: the sums of this host.
            step: as for `sum`.

        Returns:
            The sums, bitwise identical on all leaders.
        """

    def sum(
        self, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        def sum_of_hosts(host_sums: list[Gradient]) -> list[tf.Tensor]:
            leaders = self._leaders_in(exchange)
            assert leaders is not None
            return self._sum_of_hosts(leaders, host_sums, step)

        return self._host_in(exchange).sum(gradients, sum_of_hosts)
