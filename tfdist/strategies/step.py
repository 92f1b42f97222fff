"""The training step of a replica: its share of the global batch, and the variables it assigned."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import tensorflow as tf

from tfdist.global_view.rules import CONTRIBUTION, EQUAL
from tfdist.internals.graphs import marking_operations
from tfdist.jit import has_rows, is_compiled_here
from tfdist.strategies import reduction


class Step:
    """One replica's part of a step over a global batch; a context manager.

    Inside it, a loss is the mean over the replica's rows, and its gradient is weighted by the
    replica's share of the rows: the sum over the replicas is the gradient of the global batch.

    Args:
        rows: the number of rows of this replica, an int32 scalar.
        total: the number of rows of the global batch, an int32 scalar.
        first_row: the index of this replica's first row in the global batch, an int32 scalar.
        requests: the number of workers that ask for something at the end of the step, an int32
            scalar.

    Attributes:
        requests: that number.
        rows: the number of rows of this replica.
        total: the number of rows of the global batch.
        first_row: the index of this replica's first row.
        share: `rows / total`, a float32 scalar.
        some_are_empty: whether a replica has no rows, a bool scalar.
        written: the mirrored variables that the replica has assigned so far, in order.
        key: identifies this step among traces.
        scaled_by_rows: whether gradients come out of the backward pass already scaled by rows.
        agreed_on_overflow: whether either all replicas have non-finite gradients, or none has.
        late_in: the step's graph, if an update may be put off to the end of the step.
        late: the update that has been put off, of the layer that does it.
    """

    clips_together = False  # Whether workers communicate to clip by the global norm.

    def __init__(
        self, rows: tf.Tensor, total: tf.Tensor, first_row: tf.Tensor, requests: Any = 0
    ) -> None:
        self.requests = requests
        self.some_are_empty: Any = False
        self.rows = rows
        self.total = total
        self.first_row = first_row
        self.share = tf.math.divide_no_nan(tf.cast(rows, tf.float32), tf.cast(total, tf.float32))
        self.written: dict[int, Any] = {}
        self.scaled_by_rows = False
        self.agreed_on_overflow = False
        self.key = object()
        self.late_in: Any = None
        self.late: Any = None
        self._one_loss = False
        self._turns = Turns()

    def totals(self, values: list[tf.Tensor]) -> Any:
        """Sums values over the parts of the global batch."""
        local = self.zero_without_rows([tf.stop_gradient(v) for v in values])
        return reduction.sum_over_replicas(local)

    def totals_of_mask(self, mask: Any) -> Any:
        """The number of entries of a mask in the global batch, and of those that are set."""
        entries = tf.cast(tf.size(mask), tf.float32)
        return self.totals([entries, tf.reduce_sum(tf.cast(mask, tf.float32))])

    def clip_by_global_norm(
        self, gradients: Sequence[Any], variables: Sequence[Any], norm: float
    ) -> list[Any]:
        """Clips the summed gradients by their global norm.

        Args:
            gradients: dense or `tf.IndexedSlices`.
            variables: their variables.
            norm: the maximum norm.
        """
        return clip_by_norm(gradients, norm, tf.linalg.global_norm(gradients))

    def sums(self, variable: Any) -> bool:
        """Whether this replica, rather than another on its behalf, sums a variable's gradients."""
        return True

    def sum_over_replicas(
        self,
        add_up: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        gradients: Sequence[Any],
        variables: Sequence[Any],
    ) -> list[Any]:
        """Sums gradients over the replicas.

        Args:
            add_up: sums gradients, called with these and their variables.
            gradients: dense or `tf.IndexedSlices`.
            variables: their variables.
        """
        return add_up(gradients, variables)

    def squares(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tf.Tensor:
        """The sum of squares of all gradient elements, over all parts of the model.

        Args:
            gradients: the gradients of this part, dense or `tf.IndexedSlices`.
            variables: their variables.
        """
        return sum_of_squares(gradients)

    def before_update(self, variable: Any) -> list[tf.Tensor]:
        """What the update of a variable waits for besides its gradient."""
        return self._turns.before(variable) if self.late is not None else []

    def updated(self, variable: Any) -> None:
        """Records that a variable's update has been added to the graph."""
        if self.late is not None:
            self._turns.after(variable)

    def scale_by_rows(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies by the share; zero for a replica without rows, even if the value is NaN."""
        share = tf.cast(self.share, value.dtype)
        return tf.where(self.share > 0, value * share, tf.zeros_like(value))

    def unscale_by_rows(self, value: tf.Tensor) -> tf.Tensor:
        """Divides by the share; zero for a replica without rows."""
        return tf.math.divide_no_nan(value, tf.cast(self.share, value.dtype))

    @contextlib.contextmanager
    def of_one_loss(self, *, scaled: bool = False) -> Iterator[None]:
        """Declares that all gradients are of the single loss passed to `scale_loss_by_rows`.

        Args:
            scaled: whether it has been passed already.
        """
        before = self._one_loss, self.scaled_by_rows
        self._one_loss, self.scaled_by_rows = True, scaled
        try:
            yield
        finally:
            self._one_loss, self.scaled_by_rows = before

    def scale_loss_by_rows(self, loss: tf.Tensor) -> tf.Tensor:
        """Scales the loss before the backward pass, if that scales all gradients."""
        if not self._one_loss or self.scaled_by_rows:
            return loss
        self.scaled_by_rows = True
        reduction.wait_for_sums(loss)
        return self.scale_by_rows(loss)

    def scale_gradients_by_rows(self, gradients: Sequence[Any]) -> list[Any]:
        """Scales gradients from the backward pass, unless they already are; None stays None."""
        if self.scaled_by_rows:
            return self.zero_without_rows(gradients)
        first = next((g for g in gradients if tf.is_tensor(g)), None)
        if first is not None:
            reduction.wait_for_sums(first)
        return self._of_rows(gradients, lambda v: v * tf.cast(self.share, v.dtype))

    def zero_without_rows(self, values: Sequence[Any]) -> list[Any]:
        """The values; zeros on a replica without rows, where they may be NaN."""
        return self._of_rows(values, lambda v: v)

    def largest_over_replicas(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The elementwise maximum over the replicas that have rows.

        Args:
            values: non-negative.
        """
        replica, replicas = tf.distribute.get_strategy().extended.place_here()
        local = self.zero_without_rows(values)
        rows = [tf.one_hot(replica, replicas, dtype=v.dtype) for v in local]
        stacked = [tf.tensordot(row, v, 0) for row, v in zip(rows, local, strict=True)]
        return [tf.reduce_max(v, axis=0) for v in reduction.sum_over_replicas(stacked)]

    def _of_rows(
        self, values: Sequence[Any], change: Callable[[tf.Tensor], tf.Tensor]
    ) -> list[Any]:
        """Applies `change` to the values; zeros on a replica without rows; None stays None."""
        results = list(values)
        if tf.get_static_value(self.rows):
            return [None if v is None else _of_values(v, change) for v in results]
        dense = []
        for i, value in enumerate(results):
            if isinstance(value, tf.IndexedSlices):  # No rows, no slices.
                count = tf.where(self.share > 0, tf.shape(value.indices)[0], 0)
                results[i] = tf.IndexedSlices(
                    change(value.values)[:count], value.indices[:count], value.dense_shape
                )
            elif value is not None:
                dense.append(i)
        if is_compiled_here():
            rows = has_rows(self.rows)
            for i in dense:
                results[i] = tf.where(rows, change(values[i]), tf.zeros([], values[i].dtype))
            return results
        # One conditional for all; each value still depends only on itself.
        chosen = tf.cond(
            self.share > 0,
            lambda: [change(values[i]) for i in dense],
            lambda: [tf.zeros_like(values[i]) for i in dense],
        )
        for i, value in zip(dense, chosen, strict=True):
            results[i] = value
        return results

    def __enter__(self) -> Step:
        _stack().append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _stack().pop()


def _of_values(value: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(change(value.values), value.indices, value.dense_shape)
    return change(value)


class Turns:
    """The order of updates that could all begin at once.

    Large variables are updated one after the other, so that the temporaries of their update rules
    do not coexist in memory.
    """

    def __init__(self) -> None:
        self._last: tf.Tensor | None = None

    def before(self, variable: Any) -> list[tf.Tensor]:
        """What the update of a variable waits for."""
        # Updates may be in a branch of a conditional, which cannot use another branch's tensors.
        here = self._last is not None and self._last.graph is tf.compat.v1.get_default_graph()
        return [self._last] if here and _is_large(variable) else []

    def after(self, variable: Any) -> None:
        """Records that a variable's update has been added to the graph."""
        if _is_large(variable):
            self._last = variable.read_value()


def _is_large(variable: Any) -> bool:
    return bool(variable.shape.num_elements() * variable.dtype.size >= 2**20)


class WholeBatch(Step):
    """A step in which each replica processes the entire global batch, so nothing is summed.

    Args:
        rows: the number of rows of the global batch, an int32 scalar.
    """

    def __init__(self, rows: tf.Tensor) -> None:
        super().__init__(rows, rows, tf.zeros([], tf.int32))

    def totals(self, values: list[tf.Tensor]) -> Any:
        return [tf.stop_gradient(v) for v in values]


class GlobalStep(Step):
    """A step whose program is traced for the whole batch, and partitioned afterwards.

    Losses, metrics and noise need no correction. What an optimizer sums is marked by
    `contributions`.

    Args:
        static_rows: the number of rows of the batch, if the program knows it.
        own_statistics: whether each replica normalizes with the statistics of its own rows.
        assigns_own_statistics: whether it also keeps those in its moving statistics.
        gathers_statistics: whether the statistics of the whole batch are computed from those of the
            replicas, which are gathered.

    Attributes:
        static_rows: as given.
        own_statistics: as given.
        assigns_own_statistics: as given.
        gathers_statistics: as given.
    """

    def __init__(
        self,
        static_rows: int | None = None,
        *,
        own_statistics: bool = False,
        assigns_own_statistics: bool = False,
        gathers_statistics: bool = False,
    ) -> None:
        one = tf.ones([], tf.int32)
        super().__init__(one, one, tf.zeros([], tf.int32))
        self.scaled_by_rows = True
        self.static_rows = static_rows
        self.own_statistics = own_statistics
        self.assigns_own_statistics = assigns_own_statistics
        self.gathers_statistics = gathers_statistics

    @contextlib.contextmanager
    def of_one_loss(self, *, scaled: bool = False) -> Iterator[None]:
        yield

    def totals(self, values: list[tf.Tensor]) -> Any:
        return list(values)

    def scale_by_rows(self, value: tf.Tensor) -> tf.Tensor:
        return value

    def unscale_by_rows(self, value: tf.Tensor) -> tf.Tensor:
        return value

    def scale_loss_by_rows(self, loss: tf.Tensor) -> tf.Tensor:
        return loss

    def scale_gradients_by_rows(self, gradients: Sequence[Any]) -> list[Any]:
        return list(gradients)

    def zero_without_rows(self, values: Sequence[Any]) -> list[Any]:
        return contributions(values)

    def largest_over_replicas(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return list(values)


def equal_everywhere(values: Sequence[Any]) -> list[Any]:
    """Marks values that a `GlobalStep` has communicated as equal on all workers.

    Args:
        values: dense tensors, which are marked, `tf.IndexedSlices` or None.
    """
    if not in_global_step() or tf.executing_eagerly():
        return list(values)
    return _marked(values, EQUAL)


class EagerGlobalStep(GlobalStep):
    """A step that every replica runs on the whole batch, eagerly.

    The first replica contributes to sums what all of them have computed.

    Args:
        leads: whether this is the first replica, a bool scalar.
    """

    def __init__(self, leads: tf.Tensor) -> None:
        super().__init__()
        self._leads = leads

    def scale_gradients_by_rows(self, gradients: Sequence[Any]) -> list[Any]:
        return self.zero_without_rows(gradients)

    def zero_without_rows(self, values: Sequence[Any]) -> list[Any]:
        return [v if v is None or self._leads else _nothing(v) for v in values]


def _nothing(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(value.values[:0], value.indices[:0], value.dense_shape)
    return tf.zeros_like(value)


def contributions(values: Sequence[Any]) -> list[Any]:
    """Marks values of the whole batch, in a `GlobalStep`, as sums that are to be communicated.

    The partitioned program has there what a worker contributes to each sum.

    Args:
        values: dense tensors, which are marked, `tf.IndexedSlices` or None.
    """
    return _marked(values, CONTRIBUTION)


def _marked(values: Sequence[Any], mark: str) -> list[Any]:
    results = list(values)
    dense = [i for i, v in enumerate(results) if isinstance(v, tf.Tensor)]
    if dense:
        with marking_operations(mark):
            marked = tf.raw_ops.IdentityN(input=[results[i] for i in dense])
        for i, value in zip(dense, marked, strict=True):
            results[i] = tf.identity(value)  # What waits for one must not wait for all.
    return results


def clip_by_norm(gradients: Sequence[Any], norm: float, found: tf.Tensor) -> list[Any]:
    """Clips gradients by a known norm; as in Keras, sparse ones become dense.

    Args:
        gradients: dense or `tf.IndexedSlices`.
        norm: the maximum norm.
        found: the actual norm.
    """
    dense = [tf.convert_to_tensor(g) for g in gradients]
    return list(tf.clip_by_global_norm(dense, norm, use_norm=found)[0])


def sum_of_squares(gradients: Sequence[Any]) -> tf.Tensor:
    """The sum of squares of all elements, a float32 scalar."""
    values = [tf.cast(getattr(g, "values", g), tf.float32) for g in gradients]
    return tf.add_n([tf.zeros([]), *(tf.reduce_sum(v * v) for v in values)])


def current_step() -> Step | None:
    """The step that the calling replica is in, if any."""
    stack = _stack()
    return stack[-1] if stack else None


def replicated_step() -> Step | None:
    """The step that the calling replica is in, if its program sees the replica's rows only."""
    step = current_step()
    return None if isinstance(step, GlobalStep) else step


def in_global_step() -> bool:
    """Whether the calling replica traces a program for the whole batch."""
    return isinstance(current_step(), GlobalStep)


_local = threading.local()


def _stack() -> list[Step]:
    if not hasattr(_local, "steps"):
        _local.steps = []
    return _local.steps  # type: ignore[no-any-return]
