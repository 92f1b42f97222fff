"""What the workers do that the live view is tried on."""

from __future__ import annotations

import time
from pathlib import Path

import keras
import numpy as np

import tfdist
from tests.monitoring import faults


def train(strategy, folder, sleeper=None):
    """Trains until the folder has the file `stop`; returns the losses of all steps.

    Each rank creates the file `<rank>-<step>` after each of its first three steps. Before its
    fourth, the sleeper waits for the file `go`.
    """
    folder = Path(folder)
    rank = strategy.extended.worker_rank
    losses = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(logs["loss"])
            if len(losses) <= 3:
                (folder / f"{rank}-{len(losses)}").touch()
            if rank == sleeper and len(losses) == 3:
                while not (folder / "go").exists():
                    time.sleep(0.02)

        def on_epoch_end(self, epoch, logs=None):
            if rank == 0 and (folder / "stop").exists():
                self.model.stop_training = True

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001), "mse")
    x = np.random.default_rng(1).normal(size=(64, 8)).astype("float32")
    model.fit(
        x, x.sum(1), batch_size=8, epochs=1_000_000, verbose=0, shuffle=False, callbacks=[Watch()]
    )
    return losses


def train_with_a_late_worker(strategy, folder, kind, place, late):
    """Trains some steps, in one of which a worker creates `late` and waits for the file `go`."""

    def wait():
        (Path(folder) / "late").touch()
        while not (Path(folder) / "go").exists():
            time.sleep(0.02)

    once = faults.Once(wait)
    model, data, callback = faults.training(strategy, kind, place, late, once, steps=12)
    model.fit(data, epochs=1, verbose=0, callbacks=[callback])


def exchange(strategy, folder, late):
    """Exchanges a text, which one rank does when the folder has the file `go`."""
    folder = Path(folder)
    rank = strategy.extended.worker_rank
    tfdist.collective.barrier()
    (folder / str(rank)).touch()
    while rank == late and not (folder / "go").exists():
        time.sleep(0.02)
    return strategy.extended.group.exchange("what is late", str(rank))


def train_steps(strategy, epochs):
    """Trains for some epochs; returns the weights."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.random.default_rng(1).normal(size=(64, 8)).astype("float32")
    model.fit(x, x.sum(1), batch_size=8, epochs=epochs, verbose=0)
    return [weight.tobytes() for weight in model.get_weights()]
