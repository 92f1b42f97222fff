"""Trains a small convolutional network on the MNIST digits.

    python examples/mnist.py                # one process
    tfdist run -n 2 examples/mnist.py       # the same training on two workers

The data is downloaded on first use.
"""

import keras
from absl import app, flags
from keras import layers

import tfdist

FLAGS = flags.FLAGS
flags.DEFINE_integer("epochs", 3, "passes over the 60,000 digits")
flags.DEFINE_integer("batch_size", 128, "digits in a step, over all workers")
flags.DEFINE_float("learning_rate", 1e-3, "Adam's learning rate")
flags.DEFINE_integer("seed", 0, "seed of weights and order")


def load(rank):
    """Returns the training and test digits, of shape (count, 28, 28, 1) in [0, 1], and labels."""
    try:
        # One file per worker: two downloads to the same file would corrupt it.
        train, test = keras.datasets.mnist.load_data(f"mnist-{rank}.npz")
    except Exception as error:
        raise SystemExit(f"MNIST could not be downloaded: {error}") from error
    return [(images[..., None].astype("float32") / 255, labels) for images, labels in (train, test)]


def build_model():
    """Builds a model that maps images to logits of the ten digits."""
    return keras.Sequential(
        [
            keras.Input([28, 28, 1]),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def main(_):
    """Trains the model; the chief reports the accuracy on the test digits."""
    strategy = tfdist.MultiWorkerMirroredStrategy()
    chief = tfdist.is_chief()
    keras.utils.set_random_seed(FLAGS.seed)
    train, test = load(tfdist.rank())
    with strategy.scope():
        model = build_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(FLAGS.learning_rate), loss, metrics=["accuracy"])
    model.fit(
        *train,
        batch_size=FLAGS.batch_size,
        epochs=FLAGS.epochs,
        verbose=2 if chief else 0,
    )
    _, accuracy = model.evaluate(*test, batch_size=1000, verbose=0)
    if chief:
        print(f"test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    app.run(main)
