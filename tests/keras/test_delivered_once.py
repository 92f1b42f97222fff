"""Callbacks see each event once, however often `fit` is entered and wherever it is left."""

import keras
import tensorflow as tf

from tfdist._src.keras.fit.delivered_once import DeliveredOnce
from tfdist._src.keras.fit.training_data import TrainingData


class Interrupted(Exception):
    pass


class Notes(keras.callbacks.Callback):
    def __init__(self, name, notes, *, communicates=False):
        super().__init__()
        self._name, self._notes = name, notes
        self.same_on_all_workers = communicates
        self.fails_in = None

    def _note(self, event):
        if self.fails_in == event:
            self.fails_in = None
            raise Interrupted
        self._notes.append(f"{event} {self._name}")

    def on_train_begin(self, logs=None):
        self._note("train")

    def on_epoch_begin(self, epoch, logs=None):
        self._note(f"epoch {epoch}")

    def on_train_batch_end(self, batch, logs=None):
        self._note(f"batch {batch}")

    def on_epoch_end(self, epoch, logs=None):
        self._note(f"end {epoch}")


class Loop:
    """Does what Keras's loop does, from an epoch on."""

    def __init__(self):
        self.notes = []
        self.first = Notes("first", self.notes)
        self.middle = Notes("middle", self.notes, communicates=True)
        self.last = Notes("last", self.notes)
        model = keras.Sequential([keras.layers.Dense(1)])
        callbacks = [self.first, self.middle, self.last]
        self.list = DeliveredOnce(callbacks, model, TrainingData(), steps=2, epochs=2)

    def run(self, epoch, batch):
        self.list.on_train_begin()
        for e in range(epoch, 2):
            self.list.on_epoch_begin(e)
            for b in range(batch if e == epoch else 0, 2):
                self.list.on_train_batch_begin(b)
                self.list.on_train_batch_end(b, {"loss": tf.constant(1.0)})
            self.list.on_epoch_end(e, {})

    def interrupted(self, callback, event, *, again_at):
        callback.fails_in = event
        try:
            self.run(0, 0)
        except Interrupted:
            if event.startswith("batch"):
                self.list.end_batch(0, int(event[-1]), {}, self.list.seen_of(0, int(event[-1])))
            self.run(*again_at)
        return self.notes


def undisturbed():
    loop = Loop()
    loop.run(0, 0)
    return loop.notes


def test_an_event_goes_on_with_the_callbacks_that_have_not_seen_it():
    expected = undisturbed()
    for event, again_at in (("epoch 0", (0, 0)), ("end 0", (0, 2))):
        loop = Loop()
        notes = loop.interrupted(loop.last, event, again_at=again_at)
        # What communicates at the end of an epoch does so again with the others.
        repeated = ["end 0 middle"] if event == "end 0" else []
        assert sorted(notes) == sorted(expected + repeated), event


def test_the_callback_in_which_a_batch_is_left_is_not_called_again():
    loop = Loop()
    notes = loop.interrupted(loop.middle, "batch 1", again_at=(0, 2))
    assert sorted([*notes, "batch 1 middle"]) == sorted(undisturbed())
