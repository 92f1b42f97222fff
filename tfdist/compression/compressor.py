"""Sums gradients over all workers, compressed where a policy says so."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster.net.wait_messages import say
from tfdist.compression.auto import Auto, Choice
from tfdist.compression.codecs.codec import Codec
from tfdist.compression.gradient import Gradient
from tfdist.compression.policy import Policy, may_be_compressed
from tfdist.compression.registry import name_of
from tfdist.compression.state import State
from tfdist.compression.transport import Exchange
from tfdist.internals.tensorflow import get_current_replica_id_as_int

Sum = Callable[[list[Any]], list[Any]]
# For a policy's `within_hosts`, each replica's way to the other workers; all call it together.
MakeExchanges = Callable[[bool], list[Exchange]]


class Compressor:
    """Sums an optimizer's gradients over all workers.

    Args:
        policy: what to compress; None for nothing.
        make_exchanges: makes the ways to the other workers.
        devices: of this worker's replicas.
        agree: checks that all workers have the same policy; all call it together.

    Attributes:
        given: the policy at first.
    """

    def __init__(
        self,
        policy: Policy | None,
        make_exchanges: MakeExchanges,
        devices: Sequence[str],
        agree: Callable[[Policy | None], None],
    ) -> None:
        self._make_exchanges = make_exchanges
        self._agree = agree
        self._devices = list(devices)
        self._made: dict[bool, list[Exchange]] = {}
        self._numbers: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        self._policy: Policy | None = None
        self._choice: Choice | None = None
        self.given = policy
        self.change(policy)

    def change(self, policy: Policy | None) -> None:
        """Compresses by another policy from now on; all workers call this together.

        Functions that were traced before stay as they are.

        Raises:
            ProgramMismatchError: the workers were given different ones.
        """
        self._agree(policy)
        if policy is not None and policy.within_hosts not in self._made:
            self._made[policy.within_hosts] = self._make_exchanges(policy.within_hosts)
        self._policy = policy
        self._choice = None
        if policy is not None and isinstance(policy.codec, Auto):
            exchange = self._made[policy.within_hosts][0]
            if exchange.compresses:
                self._choice = Choice(policy.codec, exchange, self._devices[0])
            elif exchange.workers.rank == 0:
                say("tfdist: compression: none is chosen, as all workers are on one machine.")

    @property
    def policy(self) -> Policy | None:
        """What is compressed now."""
        return self._policy

    @property
    def active(self) -> bool:
        """Whether there is a policy, and something that it applies to."""
        return self._policy is not None and self._made[self._policy.within_hosts][0].compresses

    @property
    def codec(self) -> Codec | None:
        """The codec in use; None where nothing is compressed, or nothing is chosen yet."""
        if self._policy is None or not self.active:
            return None
        if isinstance(self._policy.codec, Auto):
            return self._choice.codec if self._choice is not None else None
        return self._policy.codec

    @property
    def is_automatic(self) -> bool:
        """Whether the policy leaves the choice to measurement; the same on all workers."""
        return self._policy is not None and isinstance(self._policy.codec, Auto)

    @property
    def choice(self) -> Choice | None:
        """The choice by measurement; None without one."""
        return self._choice

    @property
    def chosen(self) -> str:
        """The name of the codec in use, or `"none"`."""
        return name_of(self.codec)

    def new_state(self) -> State:
        """What a codec keeps, of this worker, and nothing in it yet."""
        assert self._policy is not None
        workers = self._made[self._policy.within_hosts][0].workers
        return State(f"{workers.rank} of {workers.size}")

    def keeps(self) -> bool:
        """Whether the codec in use keeps anything from step to step."""
        return self.codec is not None and bool(self.codec.kept((64, 64)))

    def prepare(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        sparse: Sequence[Any],
        elsewhere: Sequence[Any] = (),
    ) -> None:
        """Makes what the optimizer's gradients need, before any conditional is traced.

        Args:
            optimizer: a Keras optimizer; what is kept becomes its attribute `compression_state`.
            variables: all Keras variables that it trains.
            sparse: those whose gradients are sparse.
            elsewhere: those whose gradients other workers sum.

        Raises:
            ValueError: the codec does not go with the optimizer.
        """
        if self._policy is None or not self.active:
            return
        left_out = {id(v) for v in [*([] if self._policy.sparse else sparse), *elsewhere]}
        # A number stays with its variable, whatever the policy is and the gradients are.
        known = enumerate(v for v in variables if may_be_compressed(v))
        chosen = {n: v for n, v in known if id(v) not in left_out and self._policy.compresses(v)}
        self._numbers[optimizer] = {id(v): number for number, v in chosen.items()}
        if self._choice is not None:
            self._choice.make(optimizer, [tuple(v.shape) for v in chosen.values()])
        codec = self.codec
        if codec is None:
            return
        objection = codec.objection(optimizer)
        if objection:
            raise ValueError(objection)
        if not hasattr(optimizer, "compression_state"):
            optimizer.compression_state = self.new_state()
        exchange, device = self._here()
        for number, variable in chosen.items():
            shape = tuple(variable.shape)
            carries = exchange.devices if codec.kept_by_all else exchange
            if codec.compresses(shape) and carries.carries(number):
                for name, kept in codec.kept(shape).items():
                    on = exchange.workers.host if codec.on_host else device
                    optimizer.compression_state.make(name, number, kept, codec.first, on)

    def sum(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], exact: Sum
    ) -> list[Any]:
        """Sums gradients.

        Args:
            optimizer: whose gradients they are.
            gradients: tensors and `tf.IndexedSlices`.
            variables: for each gradient its Keras variable.
            exact: sums gradients without compression.

        Returns:
            The sums, in the same order, bitwise equal on all workers.
        """
        codec, numbers = self.codec, self._numbers.get(optimizer, {})
        mine: dict[int, Gradient] = {}
        rest: list[int] = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            number = numbers.get(id(variable))
            if codec is None or number is None or not codec.compresses(tuple(variable.shape)):
                rest.append(i)
            else:
                # A gradient's own shape is not always known: a dense layer's of sequences is not.
                dense = tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
                mine[i] = Gradient(dense, number, optimizer.compression_state.of(number))
        sums: dict[int, Any] = {}
        if mine and codec is not None:
            totals = self._sum(codec, optimizer.iterations, list(mine.values()), exact)
            sums.update(zip(mine, totals, strict=True))
        # These exist only when the backward pass is over, so they would hold up the others.
        if rest:
            sums.update(zip(rest, exact([gradients[i] for i in rest]), strict=True))
        return [sums[i] for i in range(len(gradients))]

    def _sum(
        self, codec: Codec, iterations: Any, gradients: list[Gradient], exact: Sum
    ) -> list[tf.Tensor]:
        assert self._policy is not None
        step = tf.cast(iterations, tf.int64)
        exact_steps = max(self._policy.warmup_steps, codec.warmup_steps)
        exchange, _ = self._here()

        def compressed() -> list[tf.Tensor]:
            begun = step - exact_steps
            return exchange.devices.sum(gradients, lambda mine: codec.sum(exchange, mine, begun))

        if not exact_steps:
            return compressed()
        values = [g.value for g in gradients]
        return list(tf.cond(step < exact_steps, lambda: list(exact(values)), compressed))

    def _here(self) -> tuple[Exchange, str]:
        """This replica's way to the others, and its device."""
        assert self._policy is not None
        replica = get_current_replica_id_as_int() if len(self._devices) > 1 else 0
        return self._made[self._policy.within_hosts][replica], self._devices[replica]
