"""Trains a small GPT to write Python, in stages: by default, two pipelines of two workers each.

    tfdist run -n 4 examples/gpt_pipeline.py                # pipeline 2 x data 2
    tfdist run -n 2 examples/gpt_pipeline.py                # one pipeline of two workers
    tfdist run -n 4 examples/gpt_pipeline.py --pipeline=4 --schedule=zb_h1

The text is the source of Python's standard library, so there is nothing to download. For
comparison, a model that only knows the frequencies of characters reaches at best a validation loss
of 3.15 nats.
"""

import pathlib
import sysconfig

import keras
import numpy as np
from absl import app, flags
from keras import layers

import tfdist

LENGTH, WIDTH, HEADS, BLOCKS, VOCABULARY = 64, 96, 4, 4, 128

FLAGS = flags.FLAGS
flags.DEFINE_integer("pipeline", 2, "workers of a pipeline; the others make more of them")
flags.DEFINE_integer("microbatches", 4, "parts of each pipeline's rows")
flags.DEFINE_string("schedule", "1f1b", "see `tfdist pipeline --help`")
flags.DEFINE_integer("epochs", 2, "how often to report the loss")
flags.DEFINE_integer("steps", 60, "training steps in an epoch")
flags.DEFINE_integer("batch_size", 32, "pieces of 64 characters in a step, over all workers")


def read_library():
    """The top-level modules of the standard library in alphabetical order, as ASCII codes."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "\n".join(file.read_text("utf-8") for file in files)
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype("int32")


def draw(text, count):
    """Draws random pieces of a text. Returns them, and the same pieces shifted by one character."""
    starts = np.random.default_rng(0).integers(len(text) - LENGTH, size=(count, 1))
    pieces = text[starts + np.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def build_model():
    """Builds a model that maps characters, (batch, LENGTH), to logits of each next character."""
    tokens = keras.Input([LENGTH], dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens) + layers.Embedding(LENGTH, WIDTH)(positions)
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(WIDTH)(y)
    return keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))


def main(_):
    """Trains the model; the chief reports the loss."""
    strategy = tfdist.HybridStrategy(
        pipeline_size=FLAGS.pipeline, microbatches=FLAGS.microbatches, schedule=FLAGS.schedule
    )
    keras.utils.set_random_seed(0)
    seen, unseen = np.split(text := read_library(), [len(text) * 9 // 10])
    with strategy.scope():
        model = tfdist.PipelineModel(build_model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    history = model.fit(
        *draw(seen, FLAGS.epochs * FLAGS.steps * FLAGS.batch_size),
        batch_size=FLAGS.batch_size,
        epochs=FLAGS.epochs,
        steps_per_epoch=FLAGS.steps,
        shuffle=False,
        validation_data=draw(unseen, 256),
        verbose=2 if tfdist.is_chief() else 0,
    )
    if tfdist.is_chief():
        print(f"validation loss {history.history['val_loss'][-1]:.3f} nats per character")


if __name__ == "__main__":
    app.run(main)
