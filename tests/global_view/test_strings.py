"""Strings, tables, and ragged and sparse tensors inside a program."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.utils import FeatureSpace

from tests.global_view.simulation import check, gathers
from tests.harness.tiers import some

SHARES = [[6, 5], [4, 4, 3], [11, 0]]
_RANDOM = np.random.default_rng(0)
TEXTS = np.array(
    ["a b", "b c d", "", "d a", "c", "zz q", "b", "a a a", "c d", "d", "x y z"], dtype=object
)
WORDS = np.array(["a", "b", "c", "d", "zz", "a", "b", "q", "d", "c", "a"], dtype=object)[:, None]
NUMBERS = _RANDOM.integers(0, 9, size=(11, 2)).astype("int64")
VALUES = _RANDOM.normal(size=(11, 3)).astype("float32")
DENSE = _RANDOM.normal(size=(11, 4)).astype("float32")
SOME = np.maximum(DENSE, 0)


def _adapted(layer, data):
    layer.adapt(data)
    return layer


def _lookup(**options):
    return _adapted(layers.StringLookup(**options), ["a", "b", "c", "b"])


def _integers(**options):
    return _adapted(layers.IntegerLookup(**options), [1, 2, 3, 2])


def _vectorization(**options):
    return _adapted(layers.TextVectorization(**options), ["a b c d", "b c", "d d"])


def _embedded():
    return keras.Sequential(
        [_vectorization(output_sequence_length=4), layers.Embedding(8, 3), layers.Dense(2)]
    )


def _space():
    space = FeatureSpace(
        features={
            "word": FeatureSpace.string_categorical(num_oov_indices=1),
            "number": FeatureSpace.integer_categorical(),
            "normalized": FeatureSpace.float_normalized(),
            "discretized": FeatureSpace.float_discretized(3),
            "hashed": FeatureSpace.string_hashed(4),
        },
        crosses=[FeatureSpace.cross(("word", "number"), crossing_dim=6)],
        output_mode="concat",
    )
    features = {
        "word": WORDS[:, 0].astype(str),
        "number": NUMBERS[:, 0],
        "normalized": VALUES[:, 0],
        "discretized": VALUES[:, 1],
        "hashed": WORDS[:, 0].astype(str),
    }
    space.adapt(tf.data.Dataset.from_tensor_slices(features))
    return lambda *columns: space(dict(zip(features, columns, strict=True)))


_COLUMNS = [WORDS[:, 0], NUMBERS[:, 0], VALUES[:, 0], VALUES[:, 1], WORDS[:, 0]]
# Their results have one element for each word in all rows.
_SPLITS = ("StringSplitV2", "UnicodeDecode")

# For each: how the layer is made, its operands, and the operations that gather rows.
LAYERS = {
    "lookup": (_lookup, [WORDS], ()),
    "lookup multi-hot": (lambda: _lookup(output_mode="multi_hot"), [WORDS], ()),
    "lookup count": (lambda: _lookup(output_mode="count", num_oov_indices=2), [WORDS], ()),
    "lookup one-hot": (lambda: _lookup(output_mode="one_hot"), [WORDS], ()),
    "inverse": (
        lambda: layers.StringLookup(vocabulary=list("abcdefghij"), invert=True),
        [NUMBERS],
        (),
    ),
    "integers": (_integers, [NUMBERS], ()),
    "integers multi-hot": (
        lambda: _integers(output_mode="multi_hot", num_oov_indices=3),
        [NUMBERS],
        (),
    ),
    "hashing": (lambda: layers.Hashing(5), [WORDS], ()),
    "salted hashing": (lambda: layers.Hashing(5, salt=[1, 2]), [WORDS], ()),
    "hashing one-hot": (lambda: layers.Hashing(5, output_mode="one_hot"), [WORDS], ()),
    "text": (_vectorization, [TEXTS], _SPLITS),
    "text padded": (lambda: _vectorization(output_sequence_length=4), [TEXTS], _SPLITS),
    "text multi-hot": (
        lambda: _vectorization(output_mode="multi_hot", ngrams=2),
        [TEXTS],
        _SPLITS,
    ),
    "text tf-idf": (lambda: _vectorization(output_mode="tf_idf"), [TEXTS], _SPLITS),
    "characters": (
        lambda: _vectorization(split="character", output_sequence_length=5),
        [TEXTS],
        _SPLITS,
    ),
    "text embedded": (_embedded, [TEXTS], _SPLITS),
    "category": (lambda: layers.CategoryEncoding(9, output_mode="multi_hot"), [NUMBERS], ()),
    "category count": (lambda: layers.CategoryEncoding(9, output_mode="count"), [NUMBERS], ()),
    "discretization": (lambda: layers.Discretization([-0.5, 0.0, 0.5]), [VALUES], ()),
    "normalization": (lambda: _adapted(layers.Normalization(), VALUES), [VALUES], ()),
    "crossing": (lambda: layers.HashedCrossing(7), [WORDS, NUMBERS[:, :1]], ("SparseCross",)),
    "features": (_space, _COLUMNS, ("SparseCross",)),
}


@pytest.mark.parametrize("static", some([False, True], always=[False]))
@pytest.mark.parametrize("shares", some(SHARES, always=[[4, 4, 3]]))
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_strings_give_the_rows_of_the_whole_batch(name, shares, static):
    make, operands, coupled = LAYERS[name]
    layer = make()

    def program(*columns):
        joined = len(columns) > 1 and isinstance(layer, keras.Layer)
        return tf.nest.flatten(layer(columns) if joined else layer(*columns))

    if isinstance(layer, keras.Model):
        layer(tf.constant(operands[0][:1]))
    _, analysis = check(program, operands, shares, static=static)
    assert set(gathers(analysis)) <= set(coupled)


_text = tf.strings
# Functions of texts, each with its operations that gather rows.
STRINGS = {
    "lower": (lambda x: _text.lower(_text.strip(x)), ()),
    "length": (lambda x: _text.length(x), ()),
    "part": (lambda x: _text.substr(x, 0, 2), ("Substr",)),
    "join": (lambda x: _text.join([x, "-", x]), ()),
    "join axis": (lambda x: _text.reduce_join(x[:, None], axis=1), ("ReduceJoin",)),
    "split": (lambda x: _text.split(x), _SPLITS),
    "split dense": (lambda x: _text.split(x).to_tensor(""), _SPLITS),
    "replace": (lambda x: _text.regex_replace(x, "a", "A"), ()),
    "match": (lambda x: _text.regex_full_match(x, "a.*"), ()),
    "hash": (lambda x: _text.to_hash_bucket_fast(x, 10), ()),
    "number": (lambda x: _text.to_number(_text.as_string(_text.length(x))), ()),
    "ngrams": (
        lambda x: _text.ngrams(_text.split(x), 2, pad_values=("", "")).to_tensor(""),
        _SPLITS,
    ),
    "bytes": (lambda x: _text.bytes_split(x).to_tensor(""), ("StringSplit",)),
    "decode": (lambda x: _text.unicode_decode(x, "UTF-8").to_tensor(0), _SPLITS),
    "equal": (lambda x: tf.cast(x == "b", tf.float32), ()),
    "unique": (lambda x: tf.unique(x), ("Unique",)),
    "where": (lambda x: tf.where(x == "b", "z", x), ()),
}


@pytest.mark.parametrize("shares", some(SHARES, always=[[4, 4, 3]]))
@pytest.mark.parametrize("name", some(STRINGS, always=["join", "split dense", "hash", "unique"]))
def test_operations_on_strings_give_the_rows_of_the_whole_batch(name, shares):
    function, coupled = STRINGS[name]
    _, analysis = check(
        lambda x: tf.nest.flatten(function(x), expand_composites=True), [TEXTS], shares
    )
    assert set(gathers(analysis)) <= set(coupled)


_ragged, _sparse = tf.RaggedTensor, tf.sparse


def _pairs(x):
    count = tf.cast(tf.shape(x)[0], tf.int64)
    indices = tf.stack([tf.range(count), tf.zeros_like(x[:, 0], tf.int64)], 1)
    return _sparse.to_dense(tf.SparseTensor(indices, x[:, 0], tf.stack([count, 4])))


def _of_sparse(function):
    return lambda x: function(_sparse.from_dense(x))


# Functions of a dense matrix. They gather rows: the sizes of their results depend on all rows.
COMPOSITES = {
    "ragged": lambda x: _ragged.from_tensor(x, padding=0.0),
    "ragged dense": lambda x: _ragged.from_tensor(x, padding=0.0).to_tensor(),
    "ragged mask": lambda x: tf.ragged.boolean_mask(x, x > 0),
    "mask": lambda x: tf.boolean_mask(x, x[:, 0] > 0),
    "sequences": lambda x: tf.sequence_mask(tf.cast(tf.reduce_sum(x, 1), tf.int32), 5, tf.float32),
    "sparse": _of_sparse(lambda s: s),
    "sparse dense": _of_sparse(_sparse.to_dense),
    "sparse sum": _of_sparse(lambda s: _sparse.reduce_sum(s, 1)),
    "sparse total": _of_sparse(lambda s: _sparse.reduce_sum(s, 0)),
    "sparse concat": _of_sparse(lambda s: _sparse.to_dense(_sparse.concat(1, [s, s]))),
    "sparse slice": _of_sparse(lambda s: _sparse.to_dense(_sparse.slice(s, [0, 0], [3, 2]))),
    "sparse add": _of_sparse(lambda s: _sparse.to_dense(_sparse.add(s, s))),
    "sparse fill": _of_sparse(lambda s: _sparse.to_dense(_sparse.fill_empty_rows(s, 1.0)[0])),
    "sparse map": _of_sparse(lambda s: _sparse.to_dense(_sparse.map_values(tf.square, s))),
    "sparse softmax": _of_sparse(lambda s: _sparse.to_dense(_sparse.softmax(s))),
    "pairs": _pairs,
    "where": lambda x: tf.where(x > 0),
    "unique": lambda x: tf.unique(tf.cast(tf.reshape(x * 3, [-1]), tf.int32)),
    "largest rows": lambda x: tf.math.top_k(x[:, 0], 3),
    "partition": lambda x: tf.dynamic_partition(x, tf.cast(x[:, 0] > 0, tf.int32), 2),
}
# Such functions with gradients.
DIFFERENTIABLE = {
    "ragged sum": lambda x: tf.reduce_sum(
        _ragged.from_tensor(x, lengths=tf.reduce_sum(tf.cast(x > 0, tf.int64), 1)), 1
    ),
    "ragged rows": lambda x: _ragged.from_value_rowids(
        tf.reshape(x, [-1]), tf.repeat(tf.range(tf.shape(x)[0]), 4)
    ).to_tensor(),
    "ragged map": lambda x: tf.ragged.map_flat_values(
        tf.square, _ragged.from_tensor(x)
    ).to_tensor(),
    "mask": lambda x: tf.boolean_mask(x, x > 0),
    "sparse product": _of_sparse(lambda s: _sparse.sparse_dense_matmul(s, tf.ones([4, 3]))),
    "segments": lambda x: tf.math.segment_sum(x, tf.range(tf.shape(x)[0]) // 2),
}


@pytest.mark.parametrize("static", some([False, True], always=[False]))
@pytest.mark.parametrize("shares", some(SHARES, always=[[6, 5]]))
@pytest.mark.parametrize(
    "name", some(COMPOSITES, always=["ragged", "mask", "sparse sum", "sparse softmax", "pairs"])
)
def test_ragged_and_sparse(name, shares, static):
    function = COMPOSITES[name]
    check(
        lambda x: tf.nest.flatten(function(x), expand_composites=True),
        [SOME],
        shares,
        static=static,
    )


@pytest.mark.parametrize("static", some([False, True], always=[False]))
@pytest.mark.parametrize("shares", some(SHARES, always=[[6, 5]]))
@pytest.mark.parametrize("name", some(DIFFERENTIABLE, always=["ragged sum", "sparse product"]))
def test_gradients_of_ragged_and_sparse(name, shares, static):
    def program(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = DIFFERENTIABLE[name](x)
            loss = tf.reduce_mean(tf.sin(result) ** 2)
        return [result, loss, tape.gradient(loss, x)]

    check(program, [SOME], shares, static=static)
