"""A callback list that delivers each event once, although `fit` is entered several times."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from tfdist._src.internals.callbacks import plain_logs
from tfdist._src.internals.iterators import set_initial_epoch
from tfdist._src.keras.fit.callback import protocol_of
from tfdist._src.keras.fit.training_data import TrainingData
from tfdist._src.strategy.extended import extended_of


class DeliveredOnce(keras.callbacks.CallbackList):  # type: ignore[misc]
    """Passes each training event to each callback once, regardless of how often `fit` is entered.

    When the group of workers changes, `fit` is entered again. Keras then begins training, the
    current epoch and its validation a second time, but the callbacks must not receive these events
    twice. If the change has interrupted an event, only the callbacks that have not received this
    event are called.

    Callbacks that communicate in an event are an exception. They receive this event each time `fit`
    is entered, because some workers may have progressed further than others. A callback names these
    events in its attribute `communicates_in`. Without this attribute, a callback with
    `same_on_all_workers` is assumed to communicate at the end of each epoch and batch.

    Args:
        callbacks: the callbacks, in order.
        model: the model in training.
        data: the training data. It is notified when an epoch begins.
        params: the remaining arguments of Keras's `CallbackList`.

    Attributes:
        epoch: the current epoch of Keras's loop.
        stopped: the value of `model.stop_training` when `fit` was left. It is restored when `fit`
            is entered again, because Keras resets it.
    """

    def __init__(
        self, callbacks: list[Any], model: keras.Model, data: TrainingData, **params: Any
    ) -> None:
        super().__init__(callbacks, model=model, **params)
        self._data = data
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets which events have been delivered, so that all events are delivered again."""
        self.epoch = 0
        self.stopped = False
        self._train_begun = False
        self._begun = self._ended = -1  # the last epochs that have begun and ended
        self._batch = (-1, -1)  # the epoch and index of the last batch that has begun
        self._batch_ended = (-1, -1)
        self._tested = _NO_TEST  # the last validation event delivered
        self._interrupted: Interrupted | None = None
        self._begun_before = _NONE_BEGUN  # see `enter_at`

    @property
    def epochs_ended(self) -> int:
        """The number of epochs for which all callbacks have received `on_epoch_end`."""
        return self._ended + 1

    def seen_of(self, epoch: int, batch: int) -> int:
        """Returns how many callbacks have received a batch's end, or were interrupted in it."""
        if self._batch_ended >= (epoch, batch):
            return len(self.callbacks)
        event = self._interrupted
        if event is None or event[:2] != (_BATCH_END, (batch,)) or self.epoch != epoch:
            return 0
        return event.callback + 1

    def end_batch(self, epoch: int, batch: int, logs: Any, communicated: int) -> None:
        """Delivers the end of a batch to the callbacks that have not received it.

        Args:
            epoch: the batch's epoch.
            batch: the index of the batch in the epoch.
            logs: the batch's logs.
            communicated: the maximum of `seen_of` over all workers. Callbacks with a lower index
                are skipped if they communicate in this event, because they have already
                communicated.
        """
        first = self.seen_of(epoch, batch)
        if self._interrupted is not None and self._interrupted.name == _BATCH_END:
            self._interrupted = None
        self._batch_ended = max(self._batch_ended, (epoch, batch))
        for number, callback in enumerate(self.callbacks[first:], first):
            if number >= communicated or not _communicates(callback, _BATCH_END):
                callback.on_train_batch_end(batch, logs=logs)

    @property
    def epochs_begun(self) -> int:
        """The number of epochs for which `on_epoch_begin` has been delivered."""
        return self._begun + 1

    def enter_at(self, epoch: int, epochs_begun: int, restore: Callable[[], object]) -> None:
        """Makes delivery begin at an epoch, in a process that has received another process's state.

        Args:
            epoch: the epoch at which delivery begins.
            epochs_begun: the number of epochs that had begun in the other process. The received
                state already includes the changes that callbacks make in `on_epoch_begin` of these
                epochs.
            restore: restores the received state after this process has delivered `on_epoch_begin`
                for these epochs as well.
        """
        self._begun = self._ended = epoch - 1
        self._begun_before = epochs_begun, restore

    def on_train_begin(self, logs: Any = None) -> None:
        if self._train_begun:
            self.model.stop_training = self.stopped  # Keras has reset this attribute.
            return
        if not self.params["steps"]:
            self.set_params({**self.params, "steps": self._data.batches_of_epoch})
        super().on_train_begin(logs)
        self._train_begun = True

    def on_train_end(self, logs: Any = None) -> None:
        self._deliver("on_train_end", (), logs, again=False)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        set_initial_epoch(self.model, None)  # `initial_epoch` holds for one entry of `fit`.
        self._data.enter_epoch(epoch)
        self._know_length()
        self.epoch = epoch
        self._ended = max(self._ended, epoch - 1)  # It may have ended on other workers.
        self._deliver("on_epoch_begin", (epoch,), logs, again=epoch <= self._begun)
        self._begun = max(self._begun, epoch)
        epochs, restore = self._begun_before
        if epoch < epochs:
            restore()
        if epoch + 1 >= epochs:
            self._begun_before = _NONE_BEGUN

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._deliver("on_epoch_end", (epoch,), logs, again=epoch <= self._ended)
        self._ended = max(self._ended, epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) > self._batch:
            self._batch = self.epoch, batch
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        logs = plain_logs(logs)
        if self._data.reentry is not None:
            self._data.reentry.logs = logs
        self._data.update_length()
        self._know_length()
        self._call(_BATCH_END, (batch,), logs, self.callbacks)
        self._batch_ended = self.epoch, batch

    def on_test_begin(self, logs: Any = None) -> None:
        self._deliver_test("on_test_begin", (), logs, (self.epoch, -1, 0))

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._deliver_test("on_test_batch_begin", (batch,), logs, (self.epoch, batch, 0))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._deliver_test("on_test_batch_end", (batch,), logs, (self.epoch, batch, 1))

    def on_test_end(self, logs: Any = None) -> None:
        self._deliver_test("on_test_end", (), logs, (self.epoch, math.inf, 1))

    def _know_length(self) -> None:
        """Tells the callbacks the number of batches per epoch if a group change has changed it."""
        if self._data.batch_size is None:
            return
        steps = self._data.batches_of_epoch
        if steps == self.params["steps"]:
            return
        self.set_params({**self.params, "steps": steps})
        for callback in self.callbacks:
            bar = getattr(callback, "progbar", None)
            if isinstance(callback, keras.callbacks.ProgbarLogger) and bar is not None:
                bar.target = steps

    def _deliver_test(
        self, event: str, arguments: tuple[int, ...], logs: Any, place: tuple[int, float, int]
    ) -> None:
        self._deliver(event, arguments, logs, again=place <= self._tested)
        self._tested = max(self._tested, place)

    def _deliver(self, event: str, arguments: tuple[int, ...], logs: Any, *, again: bool) -> None:
        first = len(self.callbacks) if again else 0
        if self._interrupted is not None and self._interrupted[:2] == (event, arguments):
            first, self._interrupted = self._interrupted.callback, None
        to_call = [
            callback if number >= first or _communicates(callback, event) else None
            for number, callback in enumerate(self.callbacks)
        ]
        self._call(event, arguments, plain_logs(logs), to_call, first)

    def _call(
        self,
        event: str,
        arguments: tuple[int, ...],
        logs: Any,
        callbacks: Sequence[Any],
        first: int = 0,
    ) -> None:
        for number, callback in enumerate(callbacks):
            if callback is None:
                continue
            try:
                getattr(callback, event)(*arguments, logs)
            except BaseException:
                if first < len(callbacks):  # Otherwise, all had received it.
                    self._interrupted = Interrupted(event, arguments, max(number, first))
                raise


_NONE_BEGUN: tuple[int, Callable[[], object]] = 0, lambda: None
_NO_TEST: tuple[int, float, int] = -1, 0, 0
"""A place before all validation events. A place is an epoch, a batch, and 0 for the beginning of
the batch or 1 for its end."""


class Interrupted(NamedTuple):
    """An event that only some of the callbacks have received.

    Attributes:
        name: the name of the callback method, such as `"on_epoch_end"`.
        arguments: the arguments of the method without `logs`: an epoch, a batch index, or nothing.
        callback: the index of the callback that was interrupted.
    """

    name: str
    arguments: tuple[int, ...]
    callback: int


_BATCH_END = "on_train_batch_end"


def _communicates(callback: Any, event: str) -> bool:
    known = protocol_of(callback)
    if known.communicates_in is not None:
        return event in known.communicates_in
    return known.same_on_all_workers and event in _WHERE_USUAL


_WHERE_USUAL = ("on_epoch_end", _BATCH_END)


def delivered_once(
    model: keras.Model, callbacks: list[Any], data: TrainingData, arguments: Mapping[str, Any]
) -> DeliveredOnce:
    """Creates the callback list for a call of `fit`, with the same settings as in Keras.

    Args:
        model: the model.
        callbacks: the callbacks.
        data: the training data.
        arguments: the arguments of `fit`.
    """
    group = extended_of(model.distribute_strategy).group
    verbose = arguments["verbose"]
    if verbose == "auto" and not group.topology.is_chief:
        verbose = 0
    return DeliveredOnce(
        callbacks,
        model,
        data,
        add_history=True,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=arguments["epochs"],
        steps=arguments["steps_per_epoch"],
    )
