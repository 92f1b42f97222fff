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
    """Checks that the numeric and boolean fields of a dataclass have the annotated types.

    Raises:
        ValueError: the type of a field's value differs from the annotation.
    """
    for field in dataclasses.fields(settings):
        # `field.type` is a string if the module of the class postpones the evaluation of
        # annotations.
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
    """An encoding that makes gradients smaller before they are sent to other hosts.

    A codec object contains only settings. It cannot be changed, and two codecs are equal if their
    settings are equal. State that a codec keeps from step to step is stored in separate variables.

    To write a codec, derive a frozen dataclass from this class, and define `bits_per_value` and
    `sum`. If the codec has state, also define `kept`, and `first` if the initial state is not zero.

    Args:
        warmup_steps: the number of steps at the beginning of training that sum gradients exactly,
            without compression.

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

    # The way in which encoded values are summed. "sharded": each host decodes one shard of the
    # gradients of all hosts, sums the shards in float32, encodes the sum, and sends the result to
    # all hosts. "summed": the encoded values themselves are summed, without decoding them.
    # "gathered": every host receives and decodes the encoded values of all hosts.
    _payload: ClassVar[str]
    # Whether the codec runs on the CPU. Otherwise it runs on the device of the gradients.
    _on_host: ClassVar[bool] = True
    # Whether every worker keeps state for each gradient. Otherwise, only the gradient's leader on
    # each host keeps state, which is the worker that exchanges the gradient with other hosts.
    _kept_by_all: ClassVar[bool] = False
    # Whether `bits_per_value` is exact. Otherwise it is an upper bound.
    _has_fixed_size: ClassVar[bool] = True

    warmup_steps: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_types(self)
        self._check("`warmup_steps` must be >= 0.", self.warmup_steps, holds=self.warmup_steps >= 0)

    @property
    def _follows_hosts(self) -> bool:
        """Whether the codec's operations depend on the division of the workers among hosts."""
        return True

    @abc.abstractmethod
    def bits_per_value(self, shape: Shape) -> float:
        """Returns the number of bits per value in which a gradient of this shape is sent.

        If a codec also encodes the sums of gradients, the bits of these sums are not counted.
        Without compression, a float32 value takes 32 bits.
        """

    def _objection(self, optimizer: Any) -> str:
        """Returns the reason why this codec cannot be used with a Keras optimizer; "" if it can."""
        return ""

    def compresses(self, shape: Shape) -> bool:
        """Whether the codec is applied to gradients of this shape.

        Returns False for shapes that the codec does not support or does not make smaller.
        """
        return True

    def _runs_on(self, exchange: Exchange, device: str) -> str:
        """Returns the device on which the codec runs and keeps its state.

        Args:
            exchange: the connections of this replica to the other workers.
            device: the device of the gradients.
        """
        return exchange.workers.device if self._on_host else device

    def kept(self, shape: Shape) -> Mapping[str, Shape]:
        """Returns the names and shapes of the state that the codec keeps for a gradient.

        The state persists from step to step, in one float32 variable for each name.

        Args:
            shape: the shape of the gradient.
        """
        return {}

    def first(self, name: str, shape: Shape) -> tf.Tensor:
        """Returns the initial value of a state variable, which must be the same on all workers.

        Args:
            name: the name of the state, as returned by `kept`.
            shape: the shape of the state.
        """
        return tf.zeros(shape, tf.float32)

    def _devices(self, exchange: Exchange) -> HostLeaders:
        """Returns how the devices of a worker divide gradients among themselves.

        The devices sum their gradients before `sum` is called.

        Args:
            exchange: the connections of this replica to the other workers.

        Returns:
            The division of `exchange`. If `sum` itself also sums over devices, this is
            `HostLeaders()`, so that each device passes its own gradients to `sum`.
        """
        return exchange.devices

    @abc.abstractmethod
    def sum(
        self, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Sums gradients over all workers.

        The workers of a host first sum their gradients exactly, without encoding them. They divide
        these sums among themselves, so that one worker of the host is responsible for each
        gradient. This worker exchanges the host's sum with the other hosts, and keeps the state of
        the codec.

        Args:
            exchange: the connections of this replica to the other workers.
                `exchange.host.sum(gradients, function)` sums gradients within the host, and calls
                `function` with the sums for which this worker is responsible. `function` must
                return their totals over all hosts. `exchange.host.sum` then returns the totals of
                all gradients on all workers of the host. `exchange.leaders.name` is the name of the
                communicator that connects the workers responsible for the same gradients on all
                hosts.
            gradients: the gradients, in the order of the forward pass. Each has the following
                attributes. `value` is a float32 tensor, and `shape` is its static shape. `number`
                is the index of the gradient among the optimizer's gradients. `kept` is a dict of
                the state variables by name, and this method must update them.
            step: an int64 scalar, the number of compressed steps before this one. It is the same on
                all workers.

        Returns:
            The sums, bitwise identical on all workers.
        """

    def _check(self, rule: str, value: Any, *, holds: bool) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: {rule} Received: {value!r}.")


def follows_hosts(codec: Codec) -> bool:
    """Whether a codec's operations depend on the division of the workers among hosts."""
    return codec._follows_hosts


def has_fixed_size(codec: Codec) -> bool:
    """Whether `bits_per_value` of a codec is exact. Otherwise it is an upper bound."""
    return codec._has_fixed_size


def objection_of(codec: Codec, optimizer: Any) -> str:
    """Returns the reason why a codec cannot be used with a Keras optimizer; "" if it can."""
    return codec._objection(optimizer)


def leads(codec: Codec, exchange: Exchange, number: int) -> bool:
    """Whether this replica keeps a codec's state for the gradient with this number."""
    return (exchange.devices if codec._kept_by_all else exchange).leads(number)


def device_of(codec: Codec, exchange: Exchange, device: str) -> str:
    """Returns the device on which a codec runs and keeps its state.

    Args:
        codec: the codec.
        exchange: the connections of this replica to the other workers.
        device: the device of the gradients.
    """
    return codec._runs_on(exchange, device)


def sum_of_replicas(
    codec: Codec, exchange: Exchange, gradients: Sequence[Gradient], step: tf.Tensor
) -> list[tf.Tensor]:
    """Sums gradients over this worker's devices, and then with `codec.sum` over all workers."""
    devices = codec._devices(exchange)
    return devices.sum(gradients, lambda mine: codec.sum(exchange, mine, step))


@dataclasses.dataclass(frozen=True)
class HierarchicalCodec(Codec):
    """A codec that sums gradients within each host, and then encodes the sum of each host."""

    def _leaders_in(self, exchange: Exchange) -> CoreCommunicator | None:
        """Returns the communicator of the leaders; None if this worker leads no gradients."""
        return exchange.leaders

    def _host_in(self, exchange: Exchange) -> HostLeaders:
        """Returns how the workers of a host divide gradients among themselves."""
        return exchange.host

    @abc.abstractmethod
    def _sum_of_hosts(
        self, leaders: CoreCommunicator, gradients: Sequence[Gradient], step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Sums gradients over all hosts.

        For each gradient, one worker per host calls this method: the leader of the gradient.

        Args:
            leaders: the communicator that connects the leaders of these gradients on all hosts.
            gradients: the gradients, already summed over the workers of this host.
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
