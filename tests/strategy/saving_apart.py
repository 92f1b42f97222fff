"""A worker that saves a model in every way and reads each file next.

python -m tests.strategy.saving_apart KIND FOLDER, where KIND is "replicated" or "sharded" and
FOLDER is where it saves. KIND may also be "late": the chief saves and leaves, and the others save
two seconds later; or "together": all workers have one folder. What it read goes to the file that
RESULT names.
"""

from __future__ import annotations

import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from tests.harness.deadlines import FAR

X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
Y = np.linspace(0, 1, 16, dtype="float32").reshape(8, 2)


def built():
    dense = layers.Dense
    return keras.Sequential(
        [
            keras.Input([3]),
            dense(4, "tanh", kernel_initializer="ones"),
            dense(2, kernel_initializer="ones"),
        ]
    )


def trained(strategy):
    with strategy.scope():
        model = built()
        model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    return model


def saved_and_read(model, folder, turns=2, others=False):
    """What is read of each save, by name.

    Args:
        model: the model.
        folder: where it is saved.
        turns: how often in each way; it is trained between.
        others: whether another worker writes the files.
    """
    read = {}
    for name, (file, save, load) in WAYS.items():
        for turn in range(turns):  # The second file replaces the first.
            path = f"{folder}/{file}"
            if turn:
                model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
            written = time_of(path) if others and not turn else 0
            save(model, path)
            assert not written or written == os.stat(path).st_mtime_ns, name
            read[f"{name} {turn}"] = np.asarray(load(model, path))
    return read


def time_of(path):
    """When another worker has written a file; waits for it."""
    deadline = time.monotonic() + FAR
    while not os.path.exists(path):
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
    return os.stat(path).st_mtime_ns


def _loaded(model, path):
    return keras.models.load_model(path, compile=False).predict(X, verbose=0)


def _weights_loaded(model, path):
    other = built()
    other.load_weights(path)
    return other.predict(X, verbose=0)


def _served(model, path):
    served = tf.saved_model.load(path)
    return served.serve(X)


def _called(model, path):
    loaded = tf.saved_model.load(path)
    (result,) = loaded.signatures["serving_default"](tf.constant(X)).values()
    return result


def _write_archive(model, path):
    archive = keras.export.ExportArchive()
    archive.add_endpoint("serve", model.call, input_signature=[tf.TensorSpec([None, 3])])
    archive.write_out(path, verbose=False)


WAYS = {
    "model": ("a.keras", lambda m, p: m.save(p), _loaded),
    "hdf5": ("b.h5", lambda m, p: m.save(p), _loaded),
    "weights": ("c.weights.h5", lambda m, p: m.save_weights(p), _weights_loaded),
    "export": ("d", lambda m, p: m.export(p, verbose=False), _served),
    "archive": ("e", _write_archive, _served),
    "SavedModel": ("f", lambda m, p: tf.saved_model.save(m, p), _called),
}


def main() -> None:
    kind, folder = sys.argv[1:]
    strategy = tfdist.MultiWorkerMirroredStrategy(shard_optimizer=kind == "sharded")
    os.makedirs(folder, exist_ok=True)
    model, group = trained(strategy), strategy.extended.group
    is_other = group.topology.rank > 0
    if kind == "late" and is_other:
        while not group.session.chief_has_left:
            time.sleep(0.01)
        time.sleep(2)
    turns = 1 if kind == "late" else 2
    read = saved_and_read(model, folder, turns, others=kind == "together" and is_other)
    for at in (folder, *(path for path, _, _ in os.walk(folder))):
        assert not any(name.startswith(".") for name in os.listdir(at)), os.listdir(at)
    np.savez(os.environ["RESULT"], **read)


if __name__ == "__main__":
    main()
