"""The input pipelines, and the models that they feed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BATCH = 64  # the rows of a global batch
_FILES, _ROWS = 8, 64  # the number of files, and the number of rows in each file
_SIDE = 160  # the height and width of the images in pixels
_WORDS = 400  # the words of a line


def write_files(folder: Path) -> None:
    """Writes the images and the lines that the pipelines read."""
    random = np.random.default_rng(0)
    for number in range(_FILES):
        with tf.io.TFRecordWriter(str(folder / f"images-{number}.tfrecord")) as writer:
            for _ in range(_ROWS):
                pixels = random.integers(0, 256, (_SIDE, _SIDE, 3)).astype("uint8")
                writer.write(tf.io.encode_jpeg(pixels).numpy())
        words = random.integers(0, 10_000, (_ROWS, _WORDS))
        lines = "\n".join(" ".join(f"word{word}" for word in line) for line in words)
        (folder / f"lines-{number}.txt").write_text(lines + "\n")


def make(name: str, folder: str) -> Any:
    """Returns a dataset of global batches, without end."""
    return {"jpeg": _jpeg, "text": _text, "numpy": _numpy}[name](Path(folder))


def _jpeg(folder: Path) -> Any:
    def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = tf.io.decode_jpeg(record, channels=3)
        image = tf.image.resize(image, (64, 64), antialias=True) / 255.0
        return image, tf.strings.to_hash_bucket_fast(record, 10)

    files = sorted(map(str, folder.glob("images-*.tfrecord")))
    records = tf.data.TFRecordDataset(files).repeat().shuffle(100, seed=1)
    return records.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH).prefetch(2)


def _text(folder: Path) -> Any:
    def encode(line: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        words = tf.strings.split(tf.strings.lower(line))
        numbers = tf.strings.to_hash_bucket_fast(tf.strings.regex_replace(words, "o", "0"), 1000)
        return numbers[:_WORDS], numbers[0] % 10

    files = sorted(map(str, folder.glob("lines-*.txt")))
    lines = tf.data.TextLineDataset(files).repeat().shuffle(100, seed=1)
    encoded = lines.map(encode, num_parallel_calls=tf.data.AUTOTUNE)
    return encoded.map(lambda x, y: (tf.ensure_shape(x, [_WORDS]), y)).batch(BATCH).prefetch(2)


def _numpy(folder: Path) -> Any:
    random = np.random.default_rng(0)
    x = random.standard_normal((_FILES * _ROWS, 256)).astype("float32")
    y = random.integers(0, 10, _FILES * _ROWS)
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(100, seed=1)
    return data.map(lambda x, y: (x * 2.0 - 1.0, y)).batch(BATCH).prefetch(2)


def model_for(name: str) -> keras.Model:
    """Returns a small compiled model, whose step takes much less time than decoding a batch."""
    layers = {
        "jpeg": [
            keras.Input((64, 64, 3)),
            keras.layers.AveragePooling2D(8),
            keras.layers.Flatten(),
        ],
        "text": [keras.Input((_WORDS,), dtype="int64"), keras.layers.Embedding(1000, 8)],
        "numpy": [keras.Input((256,))],
    }[name]
    if name == "text":
        layers.append(keras.layers.GlobalAveragePooling1D())
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model
