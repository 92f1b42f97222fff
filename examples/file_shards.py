"""Trains on Parquet or TFRecord files, in a folder or in S3; each worker reads its own files.

    pip install fsspec pyarrow s3fs
    python examples/file_shards.py --files='/tmp/chars/*.parquet' --write=32       # makes the files
    tfdist run -n 2 examples/file_shards.py --files='/tmp/chars/*.parquet'

    export FSSPEC_S3_ENDPOINT_URL=https://… AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…
    tfdist run -n 2 examples/file_shards.py --files='s3://bucket/chars/*.tfrecord'

`--files` may name files in any file system that fsspec supports. The suffix of the names determines
the format of the files. The model predicts each character of Python's standard library from the
eight before it. The last file is held out for validation.
"""

import os
import pathlib
import sysconfig
import tempfile

import fsspec
import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
from absl import app, flags
from keras import layers

import tfdist

CONTEXT, VOCABULARY = 8, 128
RECORD = {
    "context": tf.io.FixedLenFeature([CONTEXT], tf.int64),
    "next": tf.io.FixedLenFeature([], tf.int64),
}
SPEC = (tf.TensorSpec([None, CONTEXT], tf.int64), tf.TensorSpec([None], tf.int64))

FLAGS = flags.FLAGS
flags.DEFINE_string("files", None, "a pattern, such as s3://bucket/*.parquet", required=True)
flags.DEFINE_integer("write", 0, "write so many files instead of training")
flags.DEFINE_integer("rows", 1024, "rows of each file that is written")
flags.DEFINE_integer("epochs", 2, "how often all rows are read")
flags.DEFINE_integer("batch_size", 256, "rows in a step, over all workers")
flags.DEFINE_integer("shuffle", 4096, "rows among which a worker draws the next; 0 for their order")


def write_files(count):
    """Writes rows from the beginning of the standard library."""
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "\n".join(file.read_text("utf-8") for file in files).encode("ascii", "replace")
    codes = np.frombuffer(text, np.uint8)[: count * FLAGS.rows + CONTEXT].astype("int64")
    rows = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT + 1)
    system, pattern = fsspec.url_to_fs(FLAGS.files)
    system.makedirs(os.path.dirname(pattern), exist_ok=True)
    for number, part in enumerate(np.split(rows, count)):
        with system.open(pattern.replace("*", f"part-{number:05}"), "wb") as file:
            (write_parquet if pattern.endswith(".parquet") else write_records)(file, part)


def write_parquet(file, rows):
    """Writes one row group with contexts (fixed-size lists) and the characters that follow them."""
    contexts = pa.FixedSizeListArray.from_arrays(rows[:, :-1].ravel(), CONTEXT)
    pq.write_table(pa.table({"context": contexts, "next": rows[:, -1]}), file)


def write_records(file, rows):
    """Writes a file of `tf.train.Example` records."""
    with tempfile.NamedTemporaryFile() as local:
        with tf.io.TFRecordWriter(local.name) as writer:
            for row in rows:
                values = {"context": row[:-1], "next": row[-1:]}
                features = {
                    name: tf.train.Feature(int64_list=tf.train.Int64List(value=value))
                    for name, value in values.items()
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
        file.write(pathlib.Path(local.name).read_bytes())


def read(urls):
    """Returns a dataset of the rows of some files, in order."""
    if urls[0].endswith(".parquet"):
        return tf.data.Dataset.from_generator(lambda: tables(urls), output_signature=SPEC).unbatch()
    names = tf.data.Dataset.from_generator(
        lambda: map(local, urls), output_signature=tf.TensorSpec([], tf.string)
    )
    records = names.flat_map(tf.data.TFRecordDataset)
    rows = records.map(lambda record: tf.io.parse_single_example(record, RECORD))
    return rows.map(lambda row: (row["context"], row["next"]))


def local(url):
    """Returns the local path of a file; each worker first downloads a remote file, once."""
    return fsspec.open_local(url if url.startswith("file:") else f"simplecache::{url}")


def tables(urls):
    """Yields the rows of Parquet files, a thousand at a time."""
    for url in urls:
        with fsspec.open(url) as file:
            for batch in pq.ParquetFile(file).iter_batches(1000):
                contexts = batch["context"].flatten().to_numpy().reshape(-1, CONTEXT)
                yield contexts, batch["next"].to_numpy()


def train():
    """Trains on all files but the last; the chief prints the loss on the last file."""
    strategy = tfdist.MultiWorkerMirroredStrategy()
    chief = tfdist.is_chief()
    keras.utils.set_random_seed(0)
    system, pattern = fsspec.url_to_fs(FLAGS.files)
    found = sorted(system.glob(pattern))
    if len(found) <= tfdist.size():
        raise SystemExit(
            f"Each worker needs a file, and one is held out. {FLAGS.files}: {len(found)}."
        )
    *urls, held_out = (system.unstrip_protocol(path) for path in found)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([CONTEXT], dtype="int64"),
                layers.Embedding(VOCABULARY, 32),
                layers.Flatten(),
                layers.Dense(256, "relu"),
                layers.Dense(VOCABULARY),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss)

    # The validation data has only one file, so the workers must divide it by rows, not by files.
    by_rows = tf.data.Options()
    by_rows.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA

    def own_rows(context):
        """Returns this worker's part of each batch, from this worker's files."""
        rows = read(urls[context.input_pipeline_id :: context.num_input_pipelines])
        if FLAGS.shuffle:
            rows = rows.shuffle(FLAGS.shuffle, seed=context.input_pipeline_id)
        size = context.get_per_replica_batch_size(FLAGS.batch_size)
        return rows.batch(size).prefetch(2)

    history = model.fit(
        strategy.distribute_datasets_from_function(own_rows),
        epochs=FLAGS.epochs,
        validation_data=read([held_out]).batch(FLAGS.batch_size).with_options(by_rows),
        verbose=2 if chief else 0,
    )
    if chief:
        print(f"validation loss {history.history['val_loss'][-1]:.5f} nats per character")


def main(_):
    """Writes the files, or trains on them."""
    if FLAGS.write:
        write_files(FLAGS.write)
        print(f"{FLAGS.write} files of {FLAGS.rows} rows are at {FLAGS.files}")
    else:
        train()


if __name__ == "__main__":
    app.run(main)
