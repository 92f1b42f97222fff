"""All metrics that Keras has, and metrics of one's own, made in the scope or outside of it."""

from __future__ import annotations

import inspect

import keras
import numpy as np

import tfdist
from tests.strategy.behaviours.common import cross_entropy, fit, mlp, outcome, rows, scope

_SETTINGS = {
    "IoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "MeanIoU": {"num_classes": 3},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [1]},
    "OneHotMeanIoU": {"num_classes": 3},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "TopKCategoricalAccuracy": {"k": 2},
}
_OF_CLASSES = ("Accuracy", "IoU", "MeanIoU")  # They compare numbers of classes.


def _metrics():
    found = {
        name: metric
        for name, metric in vars(keras.metrics).items()
        if inspect.isclass(metric) and issubclass(metric, keras.metrics.Metric)
    }
    for not_of_targets in ("Metric", "Mean", "Sum"):
        del found[not_of_targets]
    assert len(found) >= 30
    made = {name: metric(**_SETTINGS.get(name, {})) for name, metric in found.items()}
    outputs = {"probabilities": [], "classes": [], "sparse": []}
    for name, metric in made.items():
        of_classes = name in _OF_CLASSES
        output = "classes" if of_classes else "sparse" if "Sparse" in name else "probabilities"
        outputs[output].append(metric)
    return outputs


def every_metric(strategy, inside):
    x, y = rows(11)
    one_hot = np.eye(3, dtype="float32")[y]
    metrics = None if inside else _metrics()
    with scope(strategy):
        inputs = keras.Input((8,))
        probabilities = keras.layers.Dense(3, activation="softmax", name="probabilities")(inputs)
        sparse = keras.layers.Identity(name="sparse")(probabilities)
        classes = _Classes(name="classes")(probabilities)
        model = keras.Model(
            inputs, {"probabilities": probabilities, "classes": classes, "sparse": sparse}
        )
        metrics = metrics or _metrics()
        loss = {"probabilities": "categorical_crossentropy"}
        model.compile("sgd", loss, metrics=metrics, run_eagerly=True)
    targets = {"probabilities": one_hot, "classes": y, "sparse": y}
    history = fit(model, x, targets, batch_size=7, shuffle=False)
    evaluated = model.evaluate(x, targets, batch_size=7, verbose=0, return_dict=True)
    return outcome(model, history, evaluated=evaluated)


class _Classes(keras.layers.Layer):
    def call(self, probabilities):
        return keras.ops.argmax(probabilities, axis=-1)


def made_outside_of_the_scope(strategy):
    """In `compile`, weighted and by output; read and reset after the training."""
    x, y = rows(11)
    weights = np.linspace(0.1, 2, 11, dtype="float32")
    area, accuracy = keras.metrics.AUC(), keras.metrics.SparseCategoricalAccuracy()
    with scope(strategy):
        inputs = keras.Input((8,))
        outputs = {
            "class": keras.layers.Dense(3, name="class")(inputs),
            "sign": keras.layers.Dense(1, activation="sigmoid", name="sign")(inputs),
        }
        model = keras.Model(inputs, outputs)
    model.compile(
        "sgd",
        {"class": cross_entropy(), "sign": "binary_crossentropy"},
        metrics={"sign": [area, keras.metrics.Precision()]},
        weighted_metrics={"class": [accuracy]},
    )
    targets = {"class": y, "sign": (y > 0).astype("float32")[:, None]}
    history = fit(model, x, targets, sample_weight=weights, batch_size=7, shuffle=False)
    evaluated = model.evaluate(x, targets, sample_weight=weights, batch_size=7, verbose=0)
    after = [area.result().numpy(), accuracy.result().numpy()]
    area.reset_state()
    return outcome(model, history, evaluated=evaluated, read=[*after, area.result().numpy()])


def of_a_train_step(strategy):
    """A mean and a sum of numbers for a batch, a sum of rows, and state of two other kinds."""

    class Extremes(keras.metrics.Metric):
        def __init__(self, name="extremes"):
            super().__init__(name=name)
            self.highest = self.add_variable(
                (), "zeros", aggregation="only_first_replica", name="highest"
            )
            self.last = self.add_variable((), "zeros", aggregation="mean", name="last")
            self.batches = keras.Variable(0, dtype="int32", trainable=False)

        def update_state(self, values, mean):
            values = tfdist.global_batch.rows(values)
            self.highest.assign(keras.ops.maximum(self.highest, keras.ops.max(values)))
            self.last.assign(mean)
            self.batches.assign_add(1)

        def result(self):
            return {"highest": self.highest, "last": self.last, "batches": self.batches}

    mean, total = keras.metrics.Mean(name="mean"), keras.metrics.Sum(name="total")
    of_rows, of_sums = keras.metrics.Sum(name="of_rows"), keras.metrics.Sum(name="of_sums")
    metrics = [mean, total, of_rows, of_sums]

    class Net(keras.Model):
        @property
        def metrics(self):
            return [*metrics, extremes]

        def train_step(self, data):
            x, y = data
            losses = keras.ops.square(self(x)[:, 0] - keras.ops.cast(y, "float32"))
            loss = keras.ops.mean(losses)
            mean.update_state(loss)
            total.update_state(loss)
            of_rows.update_state(losses)
            of_sums.update_state(keras.ops.sum(losses), sample_weight=1)
            extremes.update_state(losses, loss)
            return self.get_metrics_result()

    x, y = rows(11)
    with scope(strategy):
        extremes = Extremes()
        inputs = keras.Input((8,))
        model = Net(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd")
    history = fit(model, x, y, batch_size=7, shuffle=False)
    return outcome(model, history, read=[float(m.result()) for m in metrics])


def what_is_no_sum(strategy):
    """Metrics whose state is no sum over the rows."""

    class Highest(keras.metrics.Metric):
        def __init__(self, change):
            super().__init__()
            self.value = self.add_variable((), "zeros", name="value")
            self._change = change

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(self._change(self.value, keras.ops.mean(y_pred)))

        def result(self):
            return self.value

    changes = {
        "highest": keras.ops.maximum,
        "last": lambda old, new: new,
        "moving": lambda old, new: 0.9 * old + 0.1 * new,
        "one": lambda old, new: 1.0,
        "count": lambda old, new: old + 1,
        "where": lambda old, new: keras.ops.where(new > 0, old + new, old),
        "reset": lambda old, new: 0.0,
    }
    x, y = rows(11)
    found = {}
    for name, change in changes.items():
        with scope(strategy):
            model = mlp()
            model.compile("sgd", cross_entropy(), metrics=[Highest(change)])
        found[name] = fit(model, x, y, epochs=2, batch_size=4)
    return outcome(model, found)
