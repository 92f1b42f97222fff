"""Optimizers that hold and update a shard of the model's variables (ZeRO-1, arXiv 1910.02054)."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.comm import native_ops, registry
from tfdist._src.comm.buckets import pack, plan
from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.comm.native_communicator import BUCKET_BYTES, FIRST_BYTES, CoreCommunicator
from tfdist._src.comm.native_ops import from_bits, to_bits
from tfdist._src.internals.keras import BaseOptimizer
from tfdist._src.internals.optimizer import (
    blank_copy,
    forms,
    inner_optimizer,
    is_overwritten,
    numbered,
    strategy_of,
    trainable_variables_of,
)
from tfdist._src.internals.tensorflow import ResourceVariable
from tfdist._src.strategy.extended import extended_if_ours
from tfdist._src.strategy.reduction import all_gather_slices
from tfdist._src.strategy.step import equal_everywhere, gathered_parts
from tfdist.errors import UnsupportedError


@dataclass(frozen=True)
class ShardRange:
    """The elements `[start, stop)` of a flattened variable.

    Attributes:
        variable: the index of the variable among all variables that the optimizer trains.
        start: the first element.
        stop: one past the last element.
        offset: the position of the first element in the rank's shard of the bucket.
    """

    variable: int
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Variables of one type, concatenated and divided into equal shards.

    A shard boundary may fall within a variable; the last shards may contain padding.

    Attributes:
        variables: the indices of the variables.
        sizes: the number of elements of each of these variables.
        ranks: the number of shards, one for each rank.

    Example:
        >>> Bucket((0, 1), (5, 2), ranks=2).ranges(0)
        [ShardRange(variable=0, start=0, stop=4, offset=0)]
    """

    variables: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(self.sizes)

    @property
    def shard_size(self) -> int:
        """The number of elements in a rank's shard, including padding."""
        return -(-self.size // self.ranks)

    @property
    def padding(self) -> int:
        """The number of padding elements in all shards together."""
        return self.shard_size * self.ranks - self.size

    def elements(self, rank: int) -> tuple[int, int]:
        """The indices in the bucket at which a rank's shard begins and ends, without padding."""
        ends = rank * self.shard_size, (rank + 1) * self.shard_size
        return min(ends[0], self.size), min(ends[1], self.size)

    def ranges(self, rank: int) -> list[ShardRange]:
        """The parts of variables that a rank's shard consists of, in order."""
        first, last = rank * self.shard_size, (rank + 1) * self.shard_size
        ranges, begin = [], 0
        for variable, size in zip(self.variables, self.sizes, strict=True):
            start, stop = max(first, begin), min(last, begin + size)
            if start < stop:
                ranges.append(ShardRange(variable, start - begin, stop - begin, start - first))
            begin += size
        return ranges


def make_buckets(sizes: Sequence[int], groups: Sequence[Sequence[int]], ranks: int) -> list[Bucket]:
    """Returns a bucket for each group of variables.

    Args:
        sizes: the number of elements of every variable.
        groups: for each bucket, the indices of its variables in `sizes`.
        ranks: the number of shards of each bucket.
    """
    filled = [[i for i in group if sizes[i]] for group in groups]
    return [Bucket(tuple(g), tuple(sizes[i] for i in g), ranks) for g in filled if g]


NAMES = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
)
_UPDATE_METHODS = (
    "build",
    "update_step",
    "apply",
    "apply_gradients",
    "_backend_apply_gradients",
    "_backend_update_step",
    "_clip_gradients",
)


def check_elementwise(optimizer: Any) -> None:
    """Checks that an optimizer's state can be sharded.

    Raises:
        UnsupportedError: the optimizer is not known to be elementwise.
    """
    kind = type(inner_optimizer(optimizer))
    if _is_elementwise(kind):
        return
    raise UnsupportedError(
        "shard_optimizer=True needs an optimizer that updates each element independently. "
        f"Received: {kind.__name__}, which is not known to do so. Use one of {', '.join(NAMES)}, "
        "set the class attribute `elementwise = True` on a custom optimizer that does, or omit "
        "`shard_optimizer`."
    )


def is_stateless(optimizer: Any) -> bool:
    """Whether an optimizer, such as plain SGD, has no state to shard."""
    optimizer = inner_optimizer(optimizer)
    state = ("momentum", "use_ema", "gradient_accumulation_steps")
    return type(optimizer) is keras.optimizers.SGD and not any(
        getattr(optimizer, name) for name in state
    )


def check_variables(variables: Any) -> None:
    """Checks that the optimizer state of some variables can be sharded.

    Raises:
        UnsupportedError: a variable is overwritten with its gradient, as in float8 layers.
    """
    for variable in variables:
        if is_overwritten(variable):
            raise UnsupportedError(
                f"The variable {variable.path!r} is overwritten with its gradient, as in float8 "
                "layers, which shard_optimizer=True does not support. Omit one of the two."
            )


def _is_elementwise(kind: type) -> bool:
    known = {getattr(keras.optimizers, name) for name in NAMES}
    for owner in kind.__mro__:
        if owner in known or vars(owner).get("elementwise") is True:
            return True
        if any(name in vars(owner) for name in _UPDATE_METHODS):
            return False
    return False


class Shard(keras.Variable):  # type: ignore[misc]
    """A variable with some elements of a flattened model variable, and with the same name.

    Args:
        variable: the model variable.
        range_: the range of the elements.
        device: the device that holds the elements.
    """

    def __init__(self, variable: Any, range_: ShardRange, device: str) -> None:
        self.variable, self.range = variable, range_
        with local_variables(device):
            super().__init__(
                lambda shape, dtype: self.of(variable),
                (range_.size,),
                variable.dtype,
                name=variable.name.split("/")[-1].split(":")[0],
            )
        self._path = getattr(variable, "path", variable.name)

    def of(self, whole: Any) -> tf.Tensor:
        """Returns the elements of a full variable's value that belong to this shard."""
        flat = tf.reshape(tf.convert_to_tensor(whole), [-1])
        return flat[self.range.start : self.range.stop]

    def of_slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Returns the elements of `slices` that belong to this shard. Indices may repeat."""
        row = int(self.variable.shape[1:].num_elements())
        start, stop = self.range.start, self.range.stop
        rows = tf.logical_and(slices.indices >= start // row, slices.indices <= (stop - 1) // row)
        values = tf.reshape(tf.boolean_mask(slices.values, rows), [-1])
        first = tf.cast(tf.boolean_mask(slices.indices, rows), tf.int64) * row
        positions = tf.reshape(first[:, tf.newaxis] + tf.range(row, dtype=tf.int64), [-1])
        if start % row or stop % row:
            inside = tf.logical_and(positions >= start, positions < stop)
            values, positions = tf.boolean_mask(values, inside), tf.boolean_mask(positions, inside)
        return tf.IndexedSlices(values, positions - start, tf.constant([self.range.size], tf.int64))


@contextlib.contextmanager
def local_variables(device: str) -> Iterator[None]:
    """Makes all variables that are created in this context local to this process.

    The strategy in scope does not mirror or distribute them.
    """

    def create(next_creator: Any, **kwargs: Any) -> Any:
        known = ("initial_value", "trainable", "name", "dtype", "shape")
        return ResourceVariable(**{name: kwargs[name] for name in known if name in kwargs})

    with tf.init_scope(), tf.device(device), tf.variable_creator_scope(create):
        yield


class PreviousRankCopies:
    """A copy of the previous rank's slots, used to restore the slots if that rank is lost.

    Rank 0 copies the last rank's slots.

    Args:
        slots: for each kind of slot, such as Adam's momentum, the slots of this rank, bucket by
            bucket.
        buckets: the buckets, each with the indices of its slots in the lists of `slots`.
        dtypes: the data type of each bucket.
        rank: this rank.
        communicator: the communicator of all ranks.

    Attributes:
        rank: the previous rank.
        stale: whether code outside of a step has changed slots since the last exchange of copies;
            initially True.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[Any]],
        buckets: Sequence[tuple[Bucket, Sequence[int]]],
        dtypes: Sequence[tf.DType],
        rank: int,
        communicator: CoreCommunicator,
    ) -> None:
        ranks = communicator.size
        self.rank, self.stale = (rank - 1) % ranks, True
        self._communicator = communicator
        self._sent: dict[tf.DType, list[Any]] = {}
        self._ranges: dict[tuple[int, int], tuple[tf.DType, int, int]] = {}
        sizes: dict[tf.DType, int] = {}
        for kind, several in enumerate(slots):
            for number, ((bucket, own), dtype) in enumerate(zip(buckets, dtypes, strict=True)):
                self._sent.setdefault(dtype, []).extend(several[i] for i in own)
                start, stop = bucket.elements(self.rank)
                begin = sizes.get(dtype, 0)
                sizes[dtype] = begin + stop - start
                self._ranges[kind, number] = dtype, begin, sizes[dtype]
        with local_variables("CPU:0"):
            self._copies = {d: tf.Variable(tf.zeros([n], d)) for d, n in sizes.items()}

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables that hold the copies."""
        return list(self._copies.values())

    def exchange(self) -> None:
        """Sends this rank's slots to the next rank, and stores the previous rank's slots."""
        for dtype, copy in self._copies.items():
            sent = [tf.zeros([0], dtype), *map(tf.convert_to_tensor, self._sent[dtype])]
            received = _pass_on(self._communicator, pack(sent))
            copy.assign(tf.ensure_shape(received, copy.shape))

    def renew(self) -> None:
        """Exchanges the copies once, outside of a step; all ranks call this together."""
        self.exchange()
        self.stale = False

    def of(self, kind: int, bucket: int) -> tf.Tensor:
        """Returns the copies of the previous rank's slots of one kind in a bucket, concatenated."""
        dtype, begin, end = self._ranges[kind, bucket]
        return self._copies[dtype][begin:end]


def _pass_on(group: CoreCommunicator, tensor: tf.Tensor) -> tf.Tensor:
    """Sends a vector of any size to the next rank, and returns the previous rank's vector."""
    rank, size = group.place()
    with tf.device(group.device):
        rows = tf.shape(tensor, tf.int64)[0]
        to = tf.one_hot((rank + 1) % size, size, rows, tf.constant(0, tf.int64), dtype=tf.int64)
        sent = tensor if tensor.dtype in native_ops.TYPES else to_bits(tensor)
        received, _ = native_ops.all_to_all(group.token, sent, to, group.name, "copies of shards")
        return received if sent is tensor else from_bits(received, tensor.dtype)


class ShardedVariables:
    """The variables that an optimizer trains, sharded among the ranks.

    The gradients of a bucket are reduce-scattered as soon as they are available. After the update,
    the variables of the bucket are all-gathered. Together, the two collectives transfer the same
    number of bytes as an all-reduce.

    Args:
        variables: the model variables.
        communicator: the communicator over the replicas.
        device: this replica's device.

    Attributes:
        variables: the model variables.
        shards: the shards of this rank, bucket by bucket.
        buckets: the buckets, each with the indices of its shards in `shards`.
        ranks: the number of ranks among which the variables are sharded.
        rank: this rank.
        copies: the copy of the previous rank's slots; None if this rank keeps no copy.
        unbuilt: the variables that the optimizer had before it was built, such as the learning
            rate.
    """

    copies: PreviousRankCopies | None = None
    unbuilt: Sequence[Any] = ()

    def __init__(self, variables: Sequence[Any], communicator: Communicator, device: str) -> None:
        self.variables = list(variables)
        self._communicator = communicator
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]
        bytes_ = getattr(communicator, "bucket_bytes", BUCKET_BYTES)
        first = min(bytes_, FIRST_BYTES)
        groups = plan(specs, bytes_, first_bytes=first, alone_bytes=bytes_)
        sizes = [int(spec.shape.num_elements()) for spec in specs]
        # Reads of the rank and of the number of ranks are not recorded, because a change of either
        # one leads to new shards and new traces anyway.
        with registry.unnoted():
            self.rank, self.ranks = communicator.rank, communicator.size
        self.buckets: list[tuple[Bucket, list[int]]] = []
        self.shards: list[Shard] = []
        for bucket in make_buckets(sizes, groups, self.ranks):
            ranges = bucket.ranges(self.rank)
            first_shard = len(self.shards)
            self.shards += [Shard(self.variables[p.variable], p, device) for p in ranges]
            self.buckets.append((bucket, list(range(first_shard, len(self.shards)))))

        self._owners = {id(key): s.variable for s in self.shards for key in (s, s.value)}

    @property
    def dtypes(self) -> list[tf.DType]:
        """The types of the buckets."""
        return [tf.as_dtype(self.variables[b.variables[0]].dtype) for b, _ in self.buckets]

    def mark_slots_changed(self) -> None:
        """Records that code has assigned slots outside of a step, on all ranks."""
        if self.copies is not None:
            self.copies.stale = True

    def owner_of(self, variable: Any) -> Any:
        """Returns the model variable of a shard; returns any other variable unchanged."""
        return self._owners.get(id(variable), variable)

    def refresh(self) -> None:
        """Copies the model variables to the shards, because the variables may have changed."""
        for shard in self.shards:
            shard.assign(shard.of(shard.variable))

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Sums gradients over the ranks.

        Args:
            gradients: this replica's gradient of each variable: a tensor, `tf.IndexedSlices` or
                None.

        Returns:
            For each shard in `shards`, the elements of the sum that belong to this shard; None if
            the variable of the shard has no gradient.
        """
        results: list[Any] = [None] * len(self.shards)
        dense = [None if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        for bucket, shard_numbers in self.buckets:
            if all(dense[i] is None for i in bucket.variables):
                continue
            total = self._communicator.reduce_scatter(self._flatten(bucket, dense))
            for number in shard_numbers:
                range_ = self.shards[number].range
                if dense[range_.variable] is not None:
                    results[number] = total[range_.offset : range_.offset + range_.size]
        sparse = {i: g for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)}
        slices = {i: all_gather_slices(self._communicator, g) for i, g in sparse.items()}
        for number, shard in enumerate(self.shards):
            if shard.range.variable in slices:
                results[number] = shard.of_slices(slices[shard.range.variable])
        return results

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Selects each shard's elements from the full values of the variables. None stays None."""
        results: list[Any] = []
        for shard in self.shards:
            value = values[shard.range.variable]
            if isinstance(value, tf.IndexedSlices):
                results.append(shard.of_slices(value))
            else:
                results.append(None if value is None else shard.of(value))
        return results

    def gather(
        self,
        values: Sequence[Any],
        use: Callable[[int, tf.Tensor], Any],
        numbers: set[int] | None = None,
        communicator: Communicator | None = None,
        before_last: Callable[[], Sequence[Any]] = list,
    ) -> None:
        """Gathers the full values of variables from the shards of all ranks, bucket by bucket.

        Args:
            values: the value of each shard in `shards`.
            use: a function that is called with the index of each variable and the variable's full
                value.
            numbers: the indices of the variables to gather; by default, all variables.
            communicator: a communicator of the same ranks to use instead of the communicator of
                this object.
            before_last: a function that returns the operations that must run before this rank's
                contribution to the last all-gather.
        """
        communicator = communicator or self._communicator
        several = [
            (bucket, shard_numbers, wanted)
            for bucket, shard_numbers in self.buckets
            if (wanted := [n for n in bucket.variables if numbers is None or n in numbers])
        ]
        for bucket, shard_numbers, wanted in several:
            dtype = tf.as_dtype(self.variables[bucket.variables[0]].dtype)
            parts = [tf.convert_to_tensor(values[number]) for number in shard_numbers]
            padding = bucket.shard_size - sum(self.shards[n].range.size for n in shard_numbers)
            if padding:
                parts.append(tf.zeros([padding], dtype))
            # A worker without a shard of the bucket contributes zeros.
            (part,) = gathered_parts([parts[0] if len(parts) == 1 else pack(parts)])
            last = bucket is several[-1][0]
            with tf.control_dependencies(before_last() if last else []):
                full = communicator.all_gather(part)
            (full,) = equal_everywhere([full])
            full = tf.ensure_shape(full, [bucket.shard_size * bucket.ranks])
            sizes = [*bucket.sizes, bucket.padding] if bucket.padding else list(bucket.sizes)
            flats = [full] if len(sizes) == 1 else tf.split(full, sizes)
            for number, flat in zip(bucket.variables, flats, strict=False):
                if number in wanted:
                    use(number, tf.reshape(flat, self.variables[number].shape))

    def gather_and_assign(
        self,
        values: Sequence[Any],
        numbers: set[int] | None = None,
        *,
        announce: Callable[[Sequence[tf.Tensor]], None] = lambda gathered: None,
        **how: Any,
    ) -> None:
        """Gathers values from the ranks' shards, and assigns them to the variables on all ranks.

        Args:
            values: the value of each shard in `shards`.
            numbers: the indices of the variables to assign; by default, all variables.
            announce: a function that is called with all gathered values before any variable is
                assigned.
            **how: further arguments of `gather`.
        """
        gathered: dict[int, tf.Tensor] = {}
        self.gather(values, gathered.__setitem__, numbers, **how)
        announce(list(gathered.values()))
        for number, value in gathered.items():
            self.variables[number].assign(value)

    def total(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums a tensor over the ranks."""
        return self._communicator.all_reduce([tensor])[0]

    def _flatten(self, bucket: Bucket, gradients: Sequence[Any]) -> tf.Tensor:
        """Concatenates the gradients of a bucket, with zeros for missing gradients."""
        flats = []
        dtype = tf.as_dtype(self.variables[bucket.variables[0]].dtype)
        for number, size in zip(bucket.variables, bucket.sizes, strict=True):
            gradient = gradients[number]
            if gradient is None:
                flats.append(tf.zeros([size], dtype))
            else:
                flat = tf.reshape(tf.cast(gradient, dtype), [-1])
                flats.append(tf.ensure_shape(flat, [size]))
        if bucket.padding:
            flats.append(tf.zeros([bucket.padding], dtype))
        return flats[0] if len(flats) == 1 else pack(flats)


_sharded: weakref.WeakKeyDictionary[Any, ShardedVariables] = weakref.WeakKeyDictionary()


def note_sharded(optimizer: Any, sharded: ShardedVariables) -> None:
    """Records the sharded variables that an optimizer was built for."""
    _sharded[optimizer] = sharded


def sharded_by(optimizer: Any) -> ShardedVariables | None:
    """Returns the sharded variables of an optimizer; None if it is not sharded or not built."""
    # A model's `optimizer` attribute may have any type.
    if not isinstance(optimizer, BaseOptimizer):
        return None
    return _sharded.get(inner_optimizer(optimizer))


def sharded_optimizers() -> list[Any]:
    """All optimizers that were built for sharded variables."""
    return list(_sharded)


def may_shard(optimizer: Any) -> bool:
    """Whether an optimizer belongs to a strategy that shards optimizer state."""
    extended = extended_if_ours(strategy_of(optimizer))
    return extended is not None and extended.shards_optimizers


def is_sharded(optimizer: Any) -> bool:
    """Whether the state of an optimizer is sharded among the ranks."""
    return may_shard(optimizer) and not is_stateless(optimizer)


def trained_by(optimizer: Any) -> list[Any]:
    """The model variables that an optimizer was built for."""
    sharded = sharded_by(optimizer)
    if sharded is not None:
        return list(sharded.variables)
    return trainable_variables_of(inner_optimizer(optimizer))


class FullSlot:
    """The slot of a full model variable. This rank holds only some shards of the slot.

    Args:
        sharded: the sharded variables for which the optimizer was built.
        like: a variable with the shape, the type and the name of the slot.
        parts: the shards of the model variable on this rank, each with the slot of this shard.
    """

    def __init__(
        self, sharded: ShardedVariables, like: Any, parts: Sequence[tuple[Shard, Any]]
    ) -> None:
        self._sharded = sharded
        self.shape, self.dtype, self.name = like.shape, like.dtype, like.name
        self._parts = list(parts)
        self._value: Any = None

    @property
    def parts(self) -> list[tuple[int, Any, Callable[[Any], None]]]:
        """The parts of the flattened slot that this rank holds.

        Returns:
            For each shard, the index of its first element, the variable that holds the shard of
            the slot, and a function that assigns to this variable.
        """

        def assigns(slot: Any) -> Callable[[Any], None]:
            def assign(value: Any) -> None:
                slot.assign(value)
                self._sharded.mark_slots_changed()

            return assign

        return [(shard.range.start, slot, assigns(slot)) for shard, slot in self._parts]

    def assign(self, value: Any) -> None:
        """Assigns the elements of a full value to this rank's shards."""
        for shard, slot in self._parts:
            slot.assign(shard.of(value))
        self._sharded.mark_slots_changed()

    def keep(self, value: tf.Tensor) -> None:
        """Stores the full value; a conversion of this object to a tensor then returns it."""
        self._value = value

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.zeros(self.shape, self.dtype) if self._value is None else self._value


class FullState:
    """Presents the variables of a sharded optimizer in the form of an unsharded optimizer.

    Args:
        optimizer: a sharded optimizer that has been built.

    Attributes:
        blank: an unsharded copy of the optimizer. The variables of the copy have no values.
        blanks: the variables of `blank`.
        variables: for each variable in `blanks`, the corresponding `FullSlot` or variable of
            `optimizer`.

    Raises:
        ValueError: the slots of the optimizer do not correspond to the slots of the unsharded copy.
    """

    def __init__(self, optimizer: Any) -> None:
        sharded = sharded_by(optimizer)
        assert sharded is not None
        self._sharded = sharded
        blank, owners = blank_copy(optimizer, sharded.variables)
        like, shard_owners = blank_copy(optimizer, sharded.shards)
        # Keras does not track every variable that the inner optimizer of a loss scaler creates.
        shared = len(optimizer.variables) - sum(owner is not None for owner in shard_owners)
        expected = _tracked(blank, owners, shared)
        found = _tracked(like, shard_owners, shared)
        self.blank, self.blanks = blank, list(expected.values())
        self._slot_indices = {index for owner, index in expected if owner is not None}
        ranges = range(len(sharded.variables)), range(len(sharded.shards))
        slots = [{(i, n) for i in indices for n in self._slot_indices} for indices in ranges]
        if (
            forms(optimizer.variables) != forms(found.values())
            or slots != [{key for key in keys if key[0] is not None} for keys in (expected, found)]
            or any(
                forms([slot]) != forms([sharded.variables[owner]])
                for (owner, _), slot in expected.items()
                if owner is not None
            )
        ):
            raise ValueError(
                "A sharded optimizer must have the same slots for every variable, each of the "
                "variable's shape and type, and a copy made from its `get_config()` must have them "
                f"too. Received: {type(optimizer).__name__}, whose slots differ. Train without "
                "shard_optimizer=True."
            )
        self._local = dict(zip(found, optimizer.variables, strict=True))
        shards: dict[int | None, list[int]] = {}
        for i, shard in enumerate(sharded.shards):
            shards.setdefault(shard.range.variable, []).append(i)
        self._slots = {
            key: FullSlot(
                sharded,
                slot,
                [(sharded.shards[i], self._local[i, key[1]]) for i in shards.get(key[0], [])],
            )
            for key, slot in expected.items()
            if key[0] is not None
        }
        self.variables = [self._slots.get(key) or self._local[key] for key in expected]

    @property
    def own(self) -> list[list[Any]]:
        """This rank's slots: for each kind of slot, the slots in the order of the shards."""
        several = range(len(self._sharded.shards))
        return [[self._local[i, n] for i in several] for n in sorted(self._slot_indices)]

    def gather(self, communicator: Communicator, *, keep: bool) -> None:
        """Gathers the full slots; all ranks call this together.

        Args:
            communicator: the communicator of the ranks among which the optimizer's state is
                divided.
            keep: whether this rank needs the full slots afterward.
        """
        for n, values in zip(sorted(self._slot_indices), self.own, strict=True):

            def use(number: int, value: tf.Tensor, n: int = n) -> None:
                if keep:
                    self._slots[number, n].keep(value)

            self._sharded.gather(values, use, communicator=communicator)


def _tracked(
    copy: Any, owners: Sequence[int | None], shared: int
) -> dict[tuple[int | None, int], Any]:
    """Returns the slots and the first `shared` other variables of a copy, by their keys."""
    pairs = zip(numbered(owners), copy.variables, strict=True)
    return {key: v for key, v in pairs if key[0] is not None or key[1] < shared}


def full_variables(optimizer: Any) -> list[Any]:
    """Returns an optimizer's variables in unsharded form, so that code can assign full values."""
    if sharded_by(optimizer) is None:
        return list(optimizer.variables)
    return FullState(optimizer).variables
