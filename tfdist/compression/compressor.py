"""Sums gradients over all workers, compressed where a policy says so."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression.codec import Codec, Gradient
from tfdist.compression.exchange import Exchange
from tfdist.compression.policy import Policy
from tfdist.compression.state import State

Sum = Callable[[list[Any]], list[Any]]


class Compressor:
    """Sums an optimizer's gradients over all workers, each of which has one replica.

    Args:
        policy: what to compress; None for nothing.
        make_exchange: makes the way to the other workers, for a policy's `within_hosts`; all
            workers call it together.
        device: the replica's.
    """

    def __init__(
        self, policy: Policy | None, make_exchange: Callable[[bool], Exchange], device: str
    ) -> None:
        self._make_exchange = make_exchange
        self._device = device
        self._exchanges: dict[bool, Exchange] = {}
        self._numbers: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        self.change(policy)

    def change(self, policy: Policy | None) -> None:
        """Compresses by another policy from now on; all workers call this together.

        Functions that were traced before stay as they are.
        """
        self._policy = policy
        if policy is not None and policy.within_hosts not in self._exchanges:
            self._exchanges[policy.within_hosts] = self._make_exchange(policy.within_hosts)

    @property
    def codec(self) -> Codec | None:
        """The codec in use; None where nothing is compressed."""
        if self._policy is None or not self._exchanges[self._policy.within_hosts].compresses:
            return None
        return self._policy.codec

    def prepare(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Makes what the optimizer's gradients need, before any conditional is traced.

        Args:
            optimizer: a Keras optimizer; what is kept becomes its attribute `compression_state`.
            variables: all Keras variables that it trains.

        Raises:
            ValueError: the codec does not go with the optimizer.
        """
        if self._policy is None or self.codec is None:
            return
        codec, exchange = self.codec, self._exchanges[self._policy.within_hosts]
        objection = codec.objection(optimizer)
        if objection:
            raise ValueError(objection)
        chosen = [v for v in variables if self._policy.compresses(v)]
        self._numbers[optimizer] = {id(v): number for number, v in enumerate(chosen)}
        if not hasattr(optimizer, "compression_state"):
            optimizer.compression_state = State()
        host = exchange.workers.host
        for number, variable in enumerate(chosen):
            if not codec.kept_by_all and not exchange.carries(number):
                continue
            for name, shape in codec.kept(tuple(variable.shape)).items():
                device = host if codec.on_host else self._device
                optimizer.compression_state.make(name, number, shape, codec.first, device)

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
        numbers = self._numbers.get(optimizer, {}) if self.codec is not None else {}
        chosen: list[int] = []
        rest: list[int] = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            sparse = isinstance(gradient, tf.IndexedSlices)
            (rest if sparse or id(variable) not in numbers else chosen).append(i)
        sums: dict[int, Any] = {}
        if chosen:
            state: State = optimizer.compression_state
            places = [numbers[id(variables[i])] for i in chosen]
            mine = [
                Gradient(gradients[i], number, state.of(number))
                for i, number in zip(chosen, places, strict=True)
            ]
            sums.update(zip(chosen, self._sum(optimizer, mine, exact), strict=True))
        # These exist only when the backward pass is over, so they would hold up the others.
        if rest:
            sums.update(zip(rest, exact([gradients[i] for i in rest]), strict=True))
        return [sums[i] for i in range(len(gradients))]

    def _sum(self, optimizer: Any, gradients: list[Gradient], exact: Sum) -> list[tf.Tensor]:
        policy = self._policy
        assert policy is not None
        step = tf.cast(optimizer.iterations, tf.int64)

        def compressed() -> list[tf.Tensor]:
            return policy.codec.sum(self._exchanges[policy.within_hosts], gradients, step)

        if not policy.exact_steps:
            return compressed()
        values = [g.value for g in gradients]
        return list(tf.cond(step < policy.exact_steps, lambda: list(exact(values)), compressed))
