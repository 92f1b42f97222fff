"""Ways of running: loops in the graph, eagerly, by hand, several models."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.strategy.behaviours.common import (
    batches,
    compile_mlp,
    cross_entropy,
    fit,
    mlp,
    outcome,
    rows,
    scope,
)


def several_steps_per_execution(strategy):
    x, y = rows(75)
    model = compile_mlp(strategy, steps_per_execution=3)
    history = fit(model, x, y, batch_size=10, validation_data=rows(25, seed=1))
    return outcome(model, history, predictions=model.predict(x, batch_size=10, verbose=0))


def several_steps_over_a_generator(strategy):
    def produce():
        for i in range(7):
            yield rows(5, seed=i)

    model = compile_mlp(strategy, steps_per_execution=3)
    return outcome(model, fit(model, produce(), epochs=1))


def eagerly(strategy):
    x, y = rows(45)
    model = compile_mlp(strategy, run_eagerly=True)
    history = fit(model, x, y, batch_size=20, validation_data=rows(9, seed=1))
    return outcome(model, history, predictions=model.predict(x, batch_size=20, verbose=0))


def eagerly_with_accumulation_and_clipping(strategy):
    x, y = rows(45)
    model = compile_mlp(
        strategy,
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1),
        run_eagerly=True,
    )
    return outcome(model, fit(model, x, y, batch_size=12))


def compile_and_fit_again(strategy):
    x, y = rows(40)
    model = compile_mlp(strategy)
    first = fit(model, x, y, batch_size=10)
    with scope(strategy):
        model.compile(keras.optimizers.Adam(0.01), cross_entropy(), metrics=["accuracy"])
    return outcome(model, [first, fit(model, x, y, batch_size=13)])


def two_models(strategy):
    x, y = rows(40)
    one, two = compile_mlp(strategy), compile_mlp(strategy, keras.optimizers.Adam)
    first = fit(one, x, y, batch_size=10)
    second = fit(two, x, y, batch_size=9)
    third = fit(one, x, y, batch_size=10)
    return outcome(one, [first, second, third], other=two.get_weights())


def on_batches(strategy):
    x, y = rows(11)
    model = compile_mlp(strategy)
    weights = np.linspace(0.1, 1, 11).astype("float32")
    logs = [
        model.train_on_batch(x, y, return_dict=True),
        model.train_on_batch(x, y, sample_weight=weights, return_dict=True),
        model.train_on_batch(x, y, class_weight={0: 1.0, 1: 2.0, 2: 3.0}, return_dict=True),
        model.test_on_batch(x, y, return_dict=True),
    ]
    return outcome(model, logs, predictions=model.predict_on_batch(x))


def on_a_batch_of_one_row(strategy):
    x, y = rows(1)
    model = compile_mlp(strategy)
    logs = [model.train_on_batch(x, y, return_dict=True) for _ in range(2)]
    return outcome(model, logs, test=model.test_on_batch(x, y, return_dict=True))


def predict_with_any_division(strategy):
    model = compile_mlp(strategy)
    return {
        f"{count} by {size}": model.predict(rows(count)[0], batch_size=size, verbose=0)
        for count, size in [(1, 32), (2, 1), (7, 3), (32, 8), (33, 8), (5, 100)]
    }


def predict_several_outputs(strategy):
    x, _ = rows(17)
    with scope(strategy):
        inputs = keras.Input((8,))
        model = keras.Model(
            inputs, {"a": keras.layers.Dense(2)(inputs), "b": keras.layers.Dense(3)(inputs)}
        )
    return {"predictions": model.predict(x, batch_size=5, verbose=0)}


def evaluate_without_fit(strategy):
    model = compile_mlp(strategy)
    return {"evaluation": model.evaluate(*rows(23), batch_size=5, verbose=0, return_dict=True)}


def calls_outside_of_replicas(strategy):
    x, _ = rows(6)
    model = compile_mlp(strategy)
    return {"outputs": model(x).numpy(), "training": model(x, training=True).numpy()}


def custom_loop(strategy):
    """TensorFlow's tutorial: the loss is divided by the global batch, gradients are summed."""
    x, y = rows(48)
    with scope(strategy):
        model = mlp()
        optimizer = keras.optimizers.Adam(0.01)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(data):
        features, labels = data
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            loss = tf.nn.compute_average_loss(losses(labels, logits), global_batch_size=12)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, logits)
        return loss

    dataset, reduced = batches(x, y, 12), []
    if strategy is None:
        reduced = [float(step(batch)) for batch in dataset]
    else:

        @tf.function
        def distributed(batch):
            return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

        for batch in strategy.experimental_distribute_dataset(dataset):
            reduced.append(float(distributed(batch)))
    return {
        "weights": model.get_weights(),
        "losses": reduced,
        "accuracy": float(accuracy.result()),
    }


def collectives_by_hand(strategy):
    """What `tf.distribute` promises of reduce, gather, all_reduce and all_gather."""
    if strategy is None:
        return {"right": True}
    count = strategy.num_replicas_in_sync
    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([[1.0 + context.replica_id_in_sync_group]])
    )
    total = count * (count + 1) / 2
    ranks = np.arange(1.0, count + 1)

    @tf.function
    def in_replicas():
        def body(number):
            context = tf.distribute.get_replica_context()
            return (
                context.all_reduce("SUM", number),
                context.all_reduce("MEAN", {"a": number, "b": [2 * number]}),
                context.all_gather(number, axis=0),
                context.all_gather(number, axis=1),
            )

        results = strategy.run(body, args=(numbers,))
        return tf.nest.map_structure(lambda v: strategy.experimental_local_results(v)[0], results)

    summed, means, rows_, columns = in_replicas()
    checks = [
        float(strategy.reduce("SUM", numbers, axis=None)[0, 0]) == total,
        np.isclose(float(strategy.reduce("MEAN", numbers, axis=None)[0, 0]), total / count),
        np.isclose(float(strategy.reduce("MEAN", numbers, axis=0)[0]), total / count),
        np.array_equal(strategy.gather(numbers, axis=0)[:, 0], ranks),
        np.array_equal(strategy.gather(numbers, axis=1)[0], ranks),
        float(summed[0, 0]) == total,
        np.isclose(float(means["b"][0][0, 0]), 2 * total / count),
        np.array_equal(rows_[:, 0], ranks),
        np.array_equal(columns[0], ranks),
    ]
    return {"right": all(bool(check) for check in checks)}


def gradients_through_all_reduce(strategy):
    if strategy is None:
        return {"right": True}

    @tf.function
    def in_replicas():
        def body():
            x = tf.constant(3.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.distribute.get_replica_context().all_reduce("SUM", x * x)
            return tape.gradient(y, x)

        return strategy.experimental_local_results(strategy.run(body))[0]

    return {"right": float(in_replicas()) == 6.0 * strategy.num_replicas_in_sync}


def assigned_variables(strategy):
    """`tf.Variable` with each aggregation, assigned in replicas."""
    if strategy is None:
        return {"right": True}
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
        first = tf.Variable(
            0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
        )
        local = tf.Variable(
            0.0,
            aggregation=tf.VariableAggregation.SUM,
            synchronization=tf.VariableSynchronization.ON_READ,
        )

    @tf.function
    def in_replicas():
        def body():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            value = tf.cast(replica, tf.float32) + 1.0
            total.assign_add(value)
            mean.assign(value)
            first.assign_add(1)
            local.assign_add(value)

        strategy.run(body)

    in_replicas()
    whole = count * (count + 1) / 2
    return {
        "right": bool(
            float(total.numpy()) == whole
            and np.isclose(float(mean.numpy()), whole / count)
            and int(first.numpy()) == 1
            and float(local.numpy()) == whole
        )
    }


def ragged_predictions(strategy):
    class Repeats(keras.layers.Layer):
        def call(self, x):
            return tf.RaggedTensor.from_row_lengths(
                tf.repeat(x[:, 0], x[:, 1]), tf.cast(x[:, 1], tf.int64)
            )

        def compute_output_spec(self, x):
            return keras.KerasTensor((None, None), "int32")

    x = np.array([[1, 2], [2, 0], [3, 3], [4, 1], [5, 1]], "int32")
    with scope(strategy):
        inputs = keras.Input((2,), dtype="int32")
        model = keras.Model(inputs, Repeats()(inputs))
    return {"rows": model.predict(x, batch_size=3, verbose=0).to_list()}


def eagerly_with_loss_scaling(strategy):
    x, y = rows(24)
    model = compile_mlp(
        strategy,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0),
        run_eagerly=True,
    )
    return outcome(model, fit(model, x, y, batch_size=12))


class InPython(keras.layers.Layer):
    """Passes its input through a function of Python."""

    def call(self, inputs):
        @tf.custom_gradient
        def passed(x):
            x = tf.ensure_shape(tf.numpy_function(np.copy, [x], x.dtype), x.shape)
            return x, lambda gradient: gradient

        return passed(inputs)


class CalledTwice(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.compute_metrics(x, y, self(x, training=True))


def functions_of_python_on_both_sides_of_the_update(strategy):
    with scope(strategy):
        inputs = keras.Input((8,))
        x = InPython()(keras.layers.Dense(16, activation="tanh")(inputs))
        model = CalledTwice(inputs, keras.layers.Dense(3)(x))
        model.compile(keras.optimizers.Adam(0.01), cross_entropy(), metrics=["accuracy"])
    return outcome(model, fit(model, *rows(40), batch_size=10))


def own_train_function(strategy):
    """A model's own function gets the batches of its data, and nothing besides."""
    seen = []

    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            def train(iterator):
                batch = next(iterator)
                seen.append([type(batch).__name__, len(batch)])
                return {"loss": tf.constant(1.0)}

            self.train_function = train

    with scope(strategy):
        model = Own([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    fit(model, *rows(24), batch_size=8, shuffle=False)
    return {"seen": [str(one) for one in seen]}
