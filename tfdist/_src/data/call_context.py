"""The context of the running call of `fit`, `evaluate`, `predict` or `train_on_batch`.

Keras creates and reads datasets deep inside these calls, where tfdist cannot pass arguments. So
each call sets a context for its thread, and the code that runs inside the call reads it.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tfdist._src.data.first_batch import FirstBatch
from tfdist._src.data.shares import BatchForm, Replay


class Call:
    """Identifies one call of a Keras method."""


@dataclass
class CallContext:
    """The state of a running call of a Keras method.

    A nested call, such as the validation within `fit`, inherits the state of the outer call.

    Attributes:
        model: the model of the innermost call; None outside of calls.
        call: identifies the innermost call if it is `fit`, `evaluate` or `predict`; else None.
        training_call: identifies the innermost call if it is `fit` or `train_on_batch`; else None.
        training_data: the `TrainingData` of the innermost `fit`, if the position in the data is
            tracked.
        in_order: whether the workers split each batch of a dataset, even if its auto-shard policy
            requires something else. If the rows of all workers are then concatenated, they are in
            the order of the dataset.
        first_batch: compares the first batches of the datasets that are being distributed; None if
            they are not compared.
        replay: controls the batches of the datasets that are being distributed; None if their
            batches are left unchanged.
        next_form: the known properties of the batches that Keras's loop has just taken.
    """

    model: Any = None
    call: Call | None = None
    training_call: Call | None = None
    training_data: object | None = None
    in_order: bool = False
    first_batch: FirstBatch | None = None
    replay: Replay | None = None
    next_form: BatchForm = field(default_factory=BatchForm)


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.context = CallContext()


_this_thread = _ThisThread()


def current_context() -> CallContext:
    """Returns the context of the call that runs in this thread, or an empty context without one."""
    return _this_thread.context


@contextlib.contextmanager
def entered(context: CallContext) -> Iterator[None]:
    """Makes a context the current context of this thread inside the `with` block.

    Args:
        context: a copy of the current context, changed by `dataclasses.replace`.
    """
    outer, _this_thread.context = _this_thread.context, context
    try:
        yield
    finally:
        _this_thread.context = outer
