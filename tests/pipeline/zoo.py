"""Models of all the kinds that a pipeline has to divide, with batches and losses for them.

`ZOO["unet"].build()` makes a model; every builder makes the same one whenever it is called. The
models are small. Batches are made of plain NumPy arrays by a seed.
"""

from __future__ import annotations

import functools

import keras
from keras import layers, ops

from tests.pipeline.example import VOCABULARY, Example, classes, numbers_of, several, tokens
from tests.pipeline.layers import Block, Penalised, Positions, TiedHead

SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp():
    """A plain Sequential model with a regularizer and dropout."""
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16, activation="relu"),
            layers.Dense(16, activation="relu", kernel_regularizer="l2"),
            layers.Dropout(0.3, seed=3),
            layers.Dense(16, activation="relu"),
            layers.Dense(16, activation="relu", bias_regularizer="l2"),
            layers.Dense(12, activation="tanh"),
            layers.Dense(12, activation="tanh"),
            layers.Dense(5),
        ]
    )


def residual_cnn():
    """Residual blocks with batch normalization, and a skip over all of them."""
    inputs = keras.Input((8, 8, 3))
    first = x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    for _ in range(3):
        y = layers.BatchNormalization()(x)
        y = layers.Activation("relu")(y)
        y = layers.Conv2D(8, 3, padding="same", kernel_regularizer="l2")(y)
        x = layers.Add()([x, y])
    x = layers.Concatenate()([x, first])
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def unet():
    """A U-Net: each level of the way down passes its values to that of the way up."""
    inputs = keras.Input((16, 16, 1))
    x, skips = inputs, []
    for filters in (4, 8):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    x = layers.SpatialDropout2D(0.2, seed=5)(x)
    for skip in reversed(skips):
        x = layers.UpSampling2D()(x)
        x = layers.Concatenate()([x, skip])
        x = layers.Conv2D(skip.shape[-1], 3, padding="same", activation="relu")(x)
        x = layers.GroupNormalization(2)(x)
    return keras.Model(inputs, layers.Conv2D(1, 1)(x))


def gpt_block(x, index, dropout):
    """A block of a transformer that normalizes before each part."""
    width = x.shape[-1]
    y = layers.LayerNormalization(name=f"norm_{index}")(x)
    y = layers.MultiHeadAttention(2, width // 2, dropout=dropout, name=f"attention_{index}")(
        y, y, use_causal_mask=True
    )
    x = layers.Add()([x, y])
    y = layers.LayerNormalization()(x)
    y = layers.Dense(4 * width, activation="gelu")(y)
    y = layers.Dropout(dropout)(layers.Dense(width)(y))
    return layers.Add(name=f"block_{index}")([x, y])


def gpt(blocks=2, width=16, length=8, dropout=0.1, mask_zero=False, head="layer"):
    """A GPT whose head shares the embedding's matrix, in one of several ways."""
    inputs = keras.Input((length,), dtype="int32")
    kind = layers.ReversibleEmbedding if head == "reversible" else layers.Embedding
    embedding = kind(VOCABULARY, width, mask_zero=mask_zero, name="embedding")
    x = Positions(name="positions")(embedding(inputs))
    for index in range(blocks):
        x = gpt_block(x, index, dropout)
    x = layers.LayerNormalization(name="norm")(x)
    if head == "layer":
        outputs = TiedHead(embedding, name="head")(x)
    elif head == "reversible":
        outputs = embedding(x, reverse=True)
    elif head == "operation":
        outputs = ops.einsum("btd,vd->btv", x, embedding.embeddings)
    elif head == "lambda":
        project = lambda t: ops.matmul(t, ops.transpose(embedding.embeddings))  # noqa: E731
        outputs = layers.Lambda(project, output_shape=(length, VOCABULARY), name="head")(x)
    else:
        outputs = layers.Dense(VOCABULARY, name="head")(x)
    return keras.Model(inputs, outputs)


def attend(x, memory=None, **kwargs):
    """Attention to itself or to other values, and a residual; normalizes before, so masks stay."""
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(2, 8)(y, y if memory is None else memory, **kwargs)
    return layers.Add()([x, y])


def encoder_decoder():
    """A transformer with two inputs of different lengths."""
    source = keras.Input((10,), dtype="int32", name="source")
    target = keras.Input((6,), dtype="int32", name="target")
    x = layers.Embedding(VOCABULARY, 16, mask_zero=True)(source)
    y = layers.Embedding(VOCABULARY, 16, mask_zero=True)(target)
    for _ in range(2):
        x = attend(x)
        x = layers.Add()([x, layers.Dense(16, activation="relu")(x)])
    for _ in range(2):
        y = attend(y, use_causal_mask=True)
        y = attend(y, x)
    return keras.Model([source, target], layers.Dense(VOCABULARY)(y))


def rnn():
    """Recurrent layers, which skip what the mask hides."""
    inputs = keras.Input((9,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 8, mask_zero=True)(inputs)
    x = layers.LSTM(8, return_sequences=True)(x)
    x = layers.Dropout(0.1, seed=2)(x)
    x = layers.GRU(8, return_sequences=True)(x)
    x = layers.TimeDistributed(layers.Dense(6))(x)
    x = layers.Bidirectional(layers.LSTM(4))(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def several_outputs():
    """Dicts of inputs and outputs; one output is made early, one input is used late."""
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    late = keras.Input((4,), name="late")
    x = layers.Dense(16, activation="relu")(a)
    y = layers.Dense(16, activation="tanh")(b)
    z = layers.Dense(16, activation="relu")(layers.Concatenate()([x, y]))
    early = layers.Dense(3, name="early")(z)
    z = layers.Dense(16, activation="relu")(layers.Concatenate()([z, early]))
    z = z * 2.0 + ops.mean(x, axis=-1, keepdims=True)
    z = layers.Dense(16)(layers.Concatenate()([z, late]))
    return keras.Model(
        {"a": a, "b": b, "late": late}, {"early": early, "main": layers.Dense(1, name="main")(z)}
    )


def nested(normalization=layers.BatchNormalization):
    """Models in models, one of which is called twice, one inside another, one subclassed."""

    def encoder(name):
        inputs = keras.Input((12,))
        x = layers.Dense(12, activation="relu", name="dense")(inputs)
        x = normalization(name="norm")(x)
        x = layers.Dense(12, name="out")(x)
        return keras.Model(inputs, layers.Add(name="add")([x, inputs]), name=name)

    one, two = encoder("one"), encoder("two")
    inner = keras.Sequential(
        [layers.Dense(12, name="dense"), layers.Dropout(0.2, seed=1, name="dropout")],
        name="inner",
    )
    outer = keras.Sequential([inner, layers.Dense(12, name="dense")], name="outer")
    inputs = keras.Input((12,))
    x = one(inputs, training=False)
    x = outer(x)
    x = Block(12, name="block")(x)
    x = two(x)
    return keras.Model(inputs, layers.Dense(3, name="head")(one(x)))


def nested_masks():
    """Masks that come into nested models and pass through them; Keras warns of it."""

    def inner(name):
        inputs = keras.Input((None, 8))
        x = layers.GRU(8, return_sequences=True, name="gru")(inputs)
        x = layers.Activation("tanh", name="tanh")(layers.Dense(8, name="dense")(x))
        return keras.Model(inputs, x, name=name)

    inputs = keras.Input((9,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 8, mask_zero=True, name="embedding")(inputs)
    x = inner("first")(x)
    x = keras.Sequential([layers.LSTM(8, return_sequences=True)], name="second")(x)
    x = inner("third")(x)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def shared():
    """A layer with a regularizer that is called in several stages."""
    inputs = x = keras.Input((8,))
    dense = layers.Dense(8, activation="tanh", kernel_regularizer="l2", name="again")
    for _ in range(7):
        x = dense(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def operations():
    """Operations that are no layers, with several outputs and with lists of inputs."""
    inputs = keras.Input((8,))
    x = layers.Dense(8)(layers.Lambda(lambda t: t * 2.0)(inputs))
    queries, keys = ops.split(x, 2, axis=-1)
    x = ops.concatenate([keys, ops.softmax(queries)], axis=-1)
    x = layers.Lambda(lambda both: ops.sin(both[0]) + both[1])([x, inputs])
    x = ops.einsum("bi,bj->bij", x, layers.Dense(8)(x))
    x = ops.reshape(x[:, 1:, ::2], (-1, 28))
    return keras.Model(inputs, layers.Dense(2)(x))


def penalties():
    """Losses from inside layers, one of which is called twice."""
    inputs = keras.Input((8,))
    twice = Penalised(8)
    x = twice(layers.Dense(8, activation="relu", activity_regularizer="l1")(inputs))
    x = Penalised(8)(layers.Dense(8, activation="relu")(x))
    x = layers.Dense(8)(layers.ActivityRegularization(l2=1e-2)(twice(x)))
    return keras.Model(inputs, layers.Dense(2)(x))


def dropout():
    """Random numbers from seeds of several kinds."""
    inputs = keras.Input((16,))
    again = layers.Dropout(0.3, seed=7)
    x = again(layers.GaussianNoise(0.1)(layers.Dense(16)(inputs)))
    x = layers.AlphaDropout(0.1, seed=9)(layers.Dense(16, activation="selu")(x))
    x = layers.Dropout(0.5)(layers.Dense(16)(x))
    return keras.Model(inputs, layers.Dense(2)(again(x)))


def integers():
    """Integers and truths on the way between layers."""
    inputs = keras.Input((8,))
    x = layers.Dense(6, activation="relu")(inputs)
    chosen = ops.argmax(x, axis=-1)
    large = ops.greater(x, 0.1)
    y = layers.Embedding(6, 6)(chosen)
    y = layers.Dense(6, activation="tanh")(y) + x
    y = layers.Dense(6)(ops.where(large, y, ops.zeros_like(y)))
    return keras.Model(
        inputs, layers.Dense(2)(y) + ops.cast(ops.expand_dims(chosen, -1), "float32")
    )


ZOO: dict[str, Example] = {
    "mlp": Example(mlp, numbers_of(12), classes(5), SPARSE),
    "residual_cnn": Example(residual_cnn, numbers_of(8, 8, 3), classes(4), SPARSE),
    "unet": Example(unet, numbers_of(16, 16, 1), numbers_of(16, 16, 1)),
    "gpt": Example(gpt, classes(VOCABULARY, 8), classes(VOCABULARY, 8), SPARSE),
    "gpt_operation": Example(
        lambda: gpt(head="operation"), classes(VOCABULARY, 8), classes(VOCABULARY, 8), SPARSE
    ),
    "gpt_lambda": Example(
        lambda: gpt(head="lambda"), classes(VOCABULARY, 8), classes(VOCABULARY, 8), SPARSE
    ),
    "gpt_masked": Example(
        lambda: gpt(mask_zero=True), tokens(8), classes(VOCABULARY, 8), SPARSE, masked=True
    ),
    "encoder_decoder": Example(
        encoder_decoder,
        lambda rng, rows: [tokens(10)(rng, rows), tokens(6)(rng, rows)],
        classes(VOCABULARY, 6),
        SPARSE,
        masked=True,
    ),
    "rnn": Example(rnn, tokens(9), numbers_of(2), masked=True),
    "several_outputs": Example(
        several_outputs,
        several(a=numbers_of(8), b=numbers_of(8), late=numbers_of(4)),
        several(early=numbers_of(3), main=numbers_of(1)),
        {"early": "mse", "main": "mae"},
    ),
    "nested": Example(nested, numbers_of(12), classes(3), SPARSE),
    "gpt_masked_loss": Example(
        lambda: gpt(mask_zero=True, dropout=0.0),
        tokens(8),
        classes(VOCABULARY, 8),
        SPARSE,
        masked=True,
    ),
    # Rows of little variance would make much of rounding.
    "nested_layers": Example(
        lambda: nested(functools.partial(layers.LayerNormalization, epsilon=0.1)),
        numbers_of(12),
        classes(3),
        SPARSE,
    ),
    "mixed_float16_gpt": Example(
        lambda: gpt(dropout=0.0),
        classes(VOCABULARY, 8),
        classes(VOCABULARY, 8),
        SPARSE,
        policy="mixed_float16",
    ),
    "nested_masks": Example(nested_masks, tokens(9), numbers_of(2), masked=True),
    "shared": Example(shared, numbers_of(8), numbers_of(2)),
    "operations": Example(operations, numbers_of(8), numbers_of(2)),
    "penalties": Example(penalties, numbers_of(8), numbers_of(2)),
    "dropout": Example(dropout, numbers_of(16), numbers_of(2)),
    "nested_mixed_float16": Example(
        nested, numbers_of(12), classes(3), SPARSE, policy="mixed_float16"
    ),
    "gpt_mixed_float16": Example(
        lambda: gpt(head="operation"),
        classes(VOCABULARY, 8),
        classes(VOCABULARY, 8),
        SPARSE,
        policy="mixed_float16",
    ),
    "integers": Example(integers, numbers_of(8), numbers_of(2)),
}
if hasattr(layers, "ReversibleEmbedding"):
    ZOO["gpt_reversible"] = Example(
        lambda: gpt(head="reversible"), classes(VOCABULARY, 8), classes(VOCABULARY, 8), SPARSE
    )
