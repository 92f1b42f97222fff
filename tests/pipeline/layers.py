"""Layers as a user writes them, for the models of `tests.pipeline.zoo`."""

from __future__ import annotations

import keras
from keras import ops


@keras.saving.register_keras_serializable("tests")
class Positions(keras.layers.Layer):
    """Adds a learned vector for each position; masks pass."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, shape):
        self.positions = self.add_weight(shape=shape[1:], name="positions", initializer="normal")

    def call(self, x):
        return x + self.positions


@keras.saving.register_keras_serializable("tests")
class TiedHead(keras.layers.Layer):
    """Turns features into logits by the matrix of an embedding, to which it holds a reference."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.embedding = embedding

    def call(self, x):
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))

    def compute_output_shape(self, shape):
        return (*shape[:-1], self.embedding.input_dim)

    def get_config(self):
        return {
            **super().get_config(),
            "embedding": keras.saving.serialize_keras_object(self.embedding),
        }

    @classmethod
    def from_config(cls, config):
        embedding = keras.saving.deserialize_keras_object(config.pop("embedding"))
        return cls(embedding, **config)


@keras.saving.register_keras_serializable("tests")
class Penalised(keras.layers.Layer):
    """Adds losses of both kinds: its own, and that of the activity of a layer inside it."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(units, activity_regularizer="l2")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        self.add_loss(1e-2 * ops.mean(ops.square(x)))
        return self.dense(x)

    def get_config(self):
        return {**super().get_config(), "units": self.dense.units}


@keras.saving.register_keras_serializable("tests")
class Block(keras.Model):
    """A subclassed model, which is one call of the model around it."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.up = keras.layers.Dense(2 * units, activation="relu")
        self.norm = keras.layers.LayerNormalization(epsilon=0.1)
        self.down = keras.layers.Dense(units)

    def build(self, shape):
        self.up.build(shape)
        self.norm.build((*shape[:-1], self.up.units))
        self.down.build((*shape[:-1], self.up.units))

    def call(self, x, training=None):
        return x + self.down(self.norm(self.up(x)))

    def get_config(self):
        return {**super().get_config(), "units": self.down.units}
