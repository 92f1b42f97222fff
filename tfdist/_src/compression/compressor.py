"""Sums gradients over all workers, and compresses them as a policy specifies."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.comm import registry
from tfdist._src.compression.auto import Auto, Choice
from tfdist._src.compression.codecs.codec import (
    Codec,
    device_of,
    follows_hosts,
    leads,
    objection_of,
    sum_of_replicas,
)
from tfdist._src.compression.policy import Policy, may_be_compressed, name_of
from tfdist._src.compression.transport import Exchange, Gradient, State
from tfdist._src.internals.extended import await_other_replicas
from tfdist._src.internals.tensorflow import get_current_replica_id_as_int
from tfdist._src.log import logger
from tfdist._src.xla import uncompiled_scope

Route = tuple[object, ...]
EXACT: Route = ("exact",)
COMPRESSED: Route = ("compressed",)
"""The route of gradients that the core compresses. The core itself finds out which workers share a
host."""

Sum = Callable[[list[Any]], list[Any]]
# A function that creates, for each replica of this worker, the connections to the other workers.
# Its argument is the `within_hosts` of a policy. All workers must call the function together.
MakeExchanges = Callable[[bool], list[Exchange]]


class Compressor:
    """Sums an optimizer's gradients over all workers.

    Args:
        policy: selects the gradients to compress, and the codec; None for no compression.
        make_exchanges: a function that creates the connections of this worker's replicas to the
            other workers.
        devices: the devices of this worker, one for each replica.
        agree: a function that raises an error if the workers have different policies. All workers
            must call the function together.

    Attributes:
        given: the policy that was passed to the constructor.
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
        self._exchanges: dict[bool, list[Exchange]] = {}
        self._numbers: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        self._policy: Policy | None = None
        self._choice: Choice | None = None
        self._traced: set[Route] = set()
        self.given = policy
        self.change(policy)

    def change(self, policy: Policy | None) -> None:
        """Switches to another policy. All workers must call this method together.

        Existing graphs of functions continue to use the previous policy.

        Raises:
            ProgramMismatchError: the workers have different policies.
        """
        self._agree(policy)
        if policy is not None and policy.within_hosts not in self._exchanges:
            self._exchanges[policy.within_hosts] = self._make_exchanges(policy.within_hosts)
        self._policy = policy
        self._traced.clear()
        self._choose()

    def confirm(self) -> None:
        """Checks that all workers use the current policy of this worker.

        When the policy changes, each worker must call either `change` or this method, and all
        workers must do so together. A worker calls this method if it already has the new policy.

        Raises:
            ProgramMismatchError: the workers have different policies.
        """
        self._agree(self._policy)

    def _choose(self) -> None:
        self._choice = None
        if self._policy is None or not isinstance(self._policy.codec, Auto):
            return
        exchange = self._exchanges[self._policy.within_hosts][0]
        if exchange.compresses:
            self._choice = Choice(self._policy.codec, exchange.alone(), self._devices[0])
        elif exchange.workers.context.rank == 0:
            logger.info("compression: chose none, since all workers are on one host.")

    def _owner(self) -> str:
        assert self._policy is not None
        here = self._exchanges[self._policy.within_hosts][0].workers.context
        return f"{here.rank} of {here.size}"

    def _routes(self) -> Iterator[Route]:
        """Yields the properties of each replica's connections that a new graph would contain."""
        codec = self.codec
        if self._policy is None or codec is None:
            yield EXACT
            return
        for exchange in self._exchanges[self._policy.within_hosts]:
            yield (type(codec).__name__, *exchange.shape) if follows_hosts(codec) else COMPRESSED

    @property
    def routes(self) -> list[bool]:
        """The values of `within_hosts` for which connections to the other workers exist."""
        return sorted(self._exchanges)

    def renew(self) -> None:
        """Creates new connections after the workers of the job have changed.

        All workers must call this method together.

        Codecs keep the state that this worker has for its gradients. If existing graphs cannot use
        the new connections, `registry.know_group()` is true afterward, so that these graphs are
        traced again.
        """
        self._exchanges = {within: self._make_exchanges(within) for within in self.routes}
        if self._policy is not None:
            for optimizer in self._numbers:
                if state := getattr(optimizer, "compression_state", None):
                    state.move(self._owner())
        if self.is_automatic:
            # All workers must measure the new links together. New workers have not chosen a codec
            # yet, so the other workers discard their earlier choice.
            self._choose()
            registry.note_stale()
        routes = set(self._routes())
        if not all({route} == routes for route in self._traced):
            registry.note_stale()
            self._traced.clear()

    @property
    def policy(self) -> Policy | None:
        """The current policy; None for no compression."""
        return self._policy

    def note_traced(self) -> None:
        """Records that the graph being traced depends on the current connections."""
        if self._policy is not None and not tf.executing_eagerly():
            self._traced.update(self._routes())

    @property
    def active(self) -> bool:
        """Whether any gradients are compressed.

        This is the case if a policy is set and `Exchange.compresses` is true.
        """
        return self._policy is not None and self._exchanges[self._policy.within_hosts][0].compresses

    @property
    def codec(self) -> Codec | None:
        """The codec in use; None if nothing is compressed, or if no codec has been chosen yet."""
        if self._policy is None or not self.active:
            return None
        if isinstance(self._policy.codec, Auto):
            return self._choice.codec if self._choice is not None else None
        return self._policy.codec

    @property
    def is_automatic(self) -> bool:
        """Whether the policy's codec is `Auto`, which chooses a codec by measurement."""
        return self._policy is not None and isinstance(self._policy.codec, Auto)

    @property
    def choice(self) -> Choice | None:
        """The choice of a codec by measurement; None if the codec is not chosen by measurement."""
        return self._choice

    @property
    def chosen(self) -> str:
        """The name of the codec in use; `"none"` if there is none."""
        return name_of(self.codec)

    @property
    def variables(self) -> list[Any]:
        """The variables in which codecs keep their state, for all optimizers."""
        states = [getattr(optimizer, "compression_state", None) for optimizer in self._numbers]
        return [variable for state in states if state is not None for variable in state.variables]

    def new_state(self) -> State:
        """Creates an empty codec state that belongs to this worker."""
        return State(self._owner())

    def keeps(self) -> bool:
        """Whether the codec in use keeps state from step to step."""
        return self.codec is not None and bool(self.codec.kept((64, 64)))

    def prepare(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        sparse: Sequence[Any],
        elsewhere: Sequence[Any] = (),
    ) -> None:
        """Creates the codec state for an optimizer.

        This must happen before a conditional with the sum of the gradients is traced, because
        variables cannot be created in a branch.

        Args:
            optimizer: a Keras optimizer. This method stores the state in its attribute
                `compression_state`.
            variables: all Keras variables that the optimizer trains.
            sparse: those of the variables that have sparse gradients (`tf.IndexedSlices`).
            elsewhere: those of the variables for which other workers sum the gradients.

        Raises:
            ValueError: the codec is incompatible with the optimizer.
        """
        if self._policy is None or not self.active:
            return
        left_out = {id(v) for v in [*([] if self._policy.sparse else sparse), *elsewhere]}
        # The number of a variable must not depend on the policy or on the kind of its gradient.
        known = enumerate(v for v in variables if may_be_compressed(v))
        chosen = {n: v for n, v in known if id(v) not in left_out and self._policy.compresses(v)}
        self._numbers[optimizer] = {id(v): number for number, v in chosen.items()}
        if self._choice is not None:
            self._choice.make(optimizer, [tuple(v.shape) for v in chosen.values()])
        codec = self.codec
        if codec is None:
            return
        if objection := objection_of(codec, optimizer):
            raise ValueError(objection)
        if not hasattr(optimizer, "compression_state"):
            optimizer.compression_state = self.new_state()
        exchange, device = self._this_replica()
        for number, variable in chosen.items():
            shape = tuple(variable.shape)
            if codec.compresses(shape) and leads(codec, exchange, number):
                for name, kept in codec.kept(shape).items():
                    on = device_of(codec, exchange, device)
                    optimizer.compression_state.make(name, number, kept, codec.first, on)

    def sum(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], exact: Sum
    ) -> list[Any]:
        """Sums gradients.

        Args:
            optimizer: the optimizer that will apply the gradients.
            gradients: the gradients, as tensors or `tf.IndexedSlices`.
            variables: the Keras variable of each gradient.
            exact: a function that sums gradients without compression.

        Returns:
            The sums, in the order of `gradients`. They are bitwise identical on all workers.
        """
        codec, numbers = self.codec, self._numbers.get(optimizer, {})
        mine: dict[int, Gradient] = {}
        rest: list[int] = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            number = numbers.get(id(variable))
            if codec is None or number is None or not codec.compresses(tuple(variable.shape)):
                rest.append(i)
            else:
                # The static shape of a gradient may be unknown, for example for a dense layer that
                # processes sequences.
                dense = tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
                mine[i] = Gradient(dense, number, optimizer.compression_state.of(number))
        sums: dict[int, Any] = {}
        if mine and codec is not None:
            with uncompiled_scope():  # The operations of this sum may differ between workers.
                totals = self._sum(codec, optimizer.iterations, list(mine.values()), exact)
            sums.update(zip(mine, totals, strict=True))
        # The remaining gradients are complete only after the backward pass. If they were summed
        # first, the sum of the compressed gradients would have to wait.
        if rest:
            sums.update(zip(rest, exact([gradients[i] for i in rest]), strict=True))
        return [sums[i] for i in range(len(gradients))]

    def _sum(
        self, codec: Codec, iterations: Any, gradients: list[Gradient], exact: Sum
    ) -> list[tf.Tensor]:
        assert self._policy is not None
        if len(self._devices) > 1:
            await_other_replicas()
        step = tf.cast(iterations, tf.int64)
        exact_steps = max(self._policy.warmup_steps, codec.warmup_steps)
        exchange, _ = self._this_replica()

        def compressed() -> list[tf.Tensor]:
            return sum_of_replicas(codec, exchange, gradients, step - exact_steps)

        if not exact_steps:
            return compressed()
        values = [g.value for g in gradients]
        return list(tf.cond(step < exact_steps, lambda: list(exact(values)), compressed))

    def _this_replica(self) -> tuple[Exchange, str]:
        """Returns this replica's connections to the other workers, and its device."""
        assert self._policy is not None
        replica = get_current_replica_id_as_int() if len(self._devices) > 1 else 0
        return self._exchanges[self._policy.within_hosts][replica], self._devices[replica]
