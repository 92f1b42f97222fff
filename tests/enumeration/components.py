"""Programs that use the other public modules of Keras, by module."""

from __future__ import annotations

import inspect
import itertools
import pathlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from keras import random as r

from tests.enumeration.training import (
    BATCH,
    ROWS,
    Program,
    Training,
    adam,
    fractions,
    integers,
    numbers,
    public_classes,
    public_functions,
    row_weights,
    shared_folder,
    wait,
)
from tests.strategy.behaviours.common import fit, outcome, scope

PROGRAMS: dict[str, Program] = {}


def _register(module: str, programs: dict[str, Program]) -> None:
    PROGRAMS.update({f"{module}.{name}": program for name, program in programs.items()})


def _sequential(*middle: Any, features: int = 4) -> keras.Model:
    return keras.Sequential([keras.Input((features,)), *middle, layers.Dense(2)])


def _trained(
    create: Callable[[], keras.Model],
    x: Callable[[], Any] = lambda: numbers(ROWS, 4),
    y: Callable[[], Any] = lambda: numbers(ROWS, 2, seed=9),
    optimizer: Callable[[], Any] = adam,
    **compiled: Any,
) -> Training:
    return Training(
        create,
        lambda: (x(), y()),
        lambda: {"optimizer": optimizer(), "loss": "mse", **compiled},
    )


def _with_layer(create: Callable[[], Any]) -> Training:
    return _trained(lambda: _sequential(create()))


# Activations.


def _activation(name: str) -> Callable[[Any], Any]:
    activation = getattr(keras.activations, name)
    if name == "glu":  # Halves the features, which `Dense` does not expect.
        return lambda x: ops.concatenate([activation(x), activation(-x)], axis=-1)
    if name == "threshold":
        return lambda x: activation(x, 0.1, -0.2)
    return activation


_register(
    "activations",
    {
        name: _with_layer(lambda name=name: layers.Dense(6, _activation(name)))
        for name in public_functions(keras.activations)
    },
)


# Initializers.

_INITIALIZERS: dict[str, dict[str, Any]] = {
    "Constant": {"value": 0.3},
    "Identity": {"gain": 0.5},
    "Orthogonal": {"gain": 0.7},
    "RandomNormal": {"stddev": 0.4},
    "RandomUniform": {"minval": -0.3, "maxval": 0.3},
    "TruncatedNormal": {"stddev": 0.4},
    "VarianceScaling": {"scale": 0.6, "mode": "fan_avg", "distribution": "uniform"},
}


class _Ramp(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        return ops.reshape(ops.linspace(-0.4, 0.4, int(np.prod(shape))), shape)


def _initialized(name: str, **options: Any) -> Training:
    def create() -> Any:
        if name == "Initializer":
            return _Ramp()
        return getattr(keras.initializers, name)(**_INITIALIZERS.get(name, {}), **options)

    return _trained(
        lambda: _sequential(
            layers.Dense(4, "tanh", kernel_initializer=create()),
            layers.Dense(4, "tanh", kernel_initializer=create()),
        )
    )


_register(
    "initializers",
    {
        f"{name}{'/seed' if seeded else ''}": _initialized(name, **({"seed": 3} if seeded else {}))
        for name in public_classes(keras.initializers, object)
        if name not in ("STFT", "STFTInitializer")  # Part of layers:STFTSpectrogram.
        for seeded in (False, True)
        if not seeded or "seed" in inspect.signature(getattr(keras.initializers, name)).parameters
    },
)


# Regularizers, of weights and of activities.


class _Spread(keras.regularizers.Regularizer):
    """A regularizer that depends on all rows at once if it is applied to activities."""

    def __call__(self, x):
        return 0.1 * ops.max(ops.abs(x)) + 0.1 * ops.std(x)


def _regularizer(name: str) -> Any:
    if name == "Regularizer":
        return _Spread()
    options = {"OrthogonalRegularizer": {"factor": 0.1}}.get(name, {})
    return getattr(keras.regularizers, name)(**options)


_register(
    "regularizers",
    {
        f"{name}/{of}": _with_layer(
            lambda name=name, of=of: layers.Dense(
                4, "tanh", **{f"{of}_regularizer": _regularizer(name)}
            )
        )
        for name in public_classes(keras.regularizers, object)
        for of in ("kernel", "activity")
        # Keras fails in one process: it counts the rows while it builds the layer.
        if (name, of) != ("OrthogonalRegularizer", "activity")
    },
)


# Constraints.


class _Centered(keras.constraints.Constraint):
    def __call__(self, w):
        return w - ops.mean(w)


def _constraint(name: str) -> Any:
    if name == "Constraint":
        return _Centered()
    options = {"MaxNorm": {"max_value": 0.5}, "MinMaxNorm": {"min_value": 0.4, "rate": 0.5}}
    return getattr(keras.constraints, name)(**options.get(name, {}))


def _embedded(constraint: Any) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(6, 3, embeddings_constraint=constraint),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


_register(
    "constraints",
    {
        **{
            name: _with_layer(
                lambda name=name: layers.Dense(5, "tanh", kernel_constraint=_constraint(name))
            )
            for name in public_classes(keras.constraints, object)
        },
        **{
            f"{name}/embedding": _trained(
                lambda name=name: _embedded(_constraint(name)), lambda: integers(6, ROWS, 4)
            )
            for name in public_classes(keras.constraints, object)
        },
    },
)


# Random numbers, drawn in a layer for each row, for all of them, or for pairs.

_DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "beta": lambda x, seed: r.beta(ops.shape(x), 2.0, 3.0, seed=seed),
    "beta/of rows": lambda x, seed: r.beta(ops.shape(x), 1 + ops.abs(x), 2.0, seed=seed),
    "binomial": lambda x, seed: r.binomial(ops.shape(x), 5.0, 0.3, seed=seed),
    "categorical": lambda x, seed: ops.one_hot(r.categorical(x, 1, seed=seed)[:, 0], 4),
    "dropout": lambda x, seed: r.dropout(x, 0.4, seed=seed),
    "dropout/same for all rows": lambda x, seed: r.dropout(x, 0.4, (1, 4), seed=seed),
    "dropout/whole rows": lambda x, seed: r.dropout(x, 0.4, (ops.shape(x)[0], 1), seed=seed),
    "gamma": lambda x, seed: r.gamma(ops.shape(x), 2.0, seed=seed),
    "normal": lambda x, seed: r.normal(ops.shape(x), seed=seed),
    "normal/same for all rows": lambda x, seed: r.normal((4,), seed=seed),
    "normal/pairs": lambda x, seed: ops.matmul(
        r.normal((ops.shape(x)[0], ops.shape(x)[0]), stddev=0.1, seed=seed), x
    ),
    "randint": lambda x, seed: ops.cast(r.randint(ops.shape(x), 0, 7, seed=seed), x.dtype),
    "shuffle": lambda x, seed: r.shuffle(x, seed=seed),
    "shuffle/features": lambda x, seed: r.shuffle(x, axis=1, seed=seed),
    "truncated_normal": lambda x, seed: r.truncated_normal(ops.shape(x), seed=seed),
    "uniform": lambda x, seed: r.uniform(ops.shape(x), seed=seed),
}

_SEEDS: dict[str, Callable[[], Any]] = {
    "": lambda: r.SeedGenerator(4),
    "/constant": lambda: 4,
    "/default": lambda: None,
}


class Drawing(layers.Layer):
    def __init__(self, draw: Callable[[Any, Any], Any], seed: Any):
        super().__init__()
        self._draw, self._seed = draw, seed

    def call(self, x):
        return x + self._draw(x, self._seed)


def _drawing(draw: Callable[[Any, Any], Any], seed: Callable[[], Any]) -> Training:
    return _trained(lambda: _sequential(layers.Dense(4), Drawing(draw, seed())))


_register(
    "random",
    {
        f"{name}{seed}": _drawing(draw, create)
        for (name, draw), (seed, create) in itertools.product(_DRAWS.items(), _SEEDS.items())
    }
    | {"SeedGenerator": _drawing(_DRAWS["normal"], lambda: r.SeedGenerator())},
)


# Schedules.

_SCHEDULES: dict[str, dict[str, Any]] = {
    "CosineDecay": {"decay_steps": 3, "warmup_target": 0.2, "warmup_steps": 2},
    "CosineDecayRestarts": {"first_decay_steps": 2},
    "ExponentialDecay": {"decay_steps": 2, "decay_rate": 0.5},
    "InverseTimeDecay": {"decay_steps": 2, "decay_rate": 0.5},
    "PolynomialDecay": {"decay_steps": 4},
}


class _Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 * 0.5 ** ops.cast(step, "float32")


def _schedule(name: str) -> Any:
    if name == "LearningRateSchedule":
        return _Halving()
    cls = getattr(keras.optimizers.schedules, name)
    if name == "PiecewiseConstantDecay":
        return cls([1, 3], [0.1, 0.05, 0.02])
    return cls(0.1, **_SCHEDULES[name])


_register(
    "optimizers.schedules",
    {
        name: _trained(
            lambda: _sequential(layers.Dense(5, "tanh")),
            optimizer=lambda name=name: keras.optimizers.SGD(_schedule(name), momentum=0.5),
        )
        for name in public_classes(keras.optimizers.schedules, object)
    },
)


# Dtype policies and quantizers.


def _of_policy(policy: Callable[[], Any]) -> Training:
    return _with_layer(lambda: layers.Dense(4, "tanh", dtype=policy()))


def _policy_map() -> Any:
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies["nested/hidden"] = keras.DTypePolicy("float64")
    return policies


class _Nested(layers.Layer):
    def __init__(self, **options: Any):
        super().__init__(name="nested", **options)
        self.hidden = layers.Dense(4, "tanh", dtype=self.dtype_policy, name="hidden")

    def build(self, shape):
        self.hidden.build(shape)

    def call(self, x):
        return ops.cast(self.hidden(x), "float32")


def _quantized(mode: str) -> Program:
    """Quantizes a model after `fit`, then evaluates and predicts."""

    def program(strategy: Any) -> dict[str, Any]:
        with scope(strategy):
            model = _sequential(layers.Dense(8, "tanh"), features=16)
            model.compile(adam(), "mse", metrics=["mae"])
        x, y = numbers(ROWS, 16), numbers(ROWS, 2, seed=9)
        fit(model, x, y, batch_size=BATCH, shuffle=False)
        with scope(strategy):
            model.quantize(mode)
            model.compile(adam(), "mse", metrics=["mae"])
        tested = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
        return {"weights": None, "evaluated": tested, "predicted": predicted}

    return program


_register(
    "dtype_policies",
    {
        "DTypePolicy": _of_policy(lambda: keras.DTypePolicy("float64")),
        "FloatDTypePolicy": _of_policy(lambda: keras.dtype_policies.FloatDTypePolicy("float64")),
        "DTypePolicyMap": _trained(lambda: _sequential(_Nested(dtype=_policy_map()))),
        "QuantizedDTypePolicy": _quantized("int8"),
        "Int4DTypePolicy": _quantized("int4"),
        "QuantizedFloat8DTypePolicy": _of_policy(lambda: "float8_from_float32"),
    },
)


class _Applying(layers.Layer):
    def __init__(self, function: Callable[[Any], Any]):
        super().__init__()
        self._function = function

    def call(self, x):
        return self._function(x)


def _applied(function: Callable[[Any], Any]) -> Training:
    return _trained(lambda: _sequential(layers.Dense(4), _Applying(function)))


def _straight_through(x: Any, quantized: Any) -> Any:
    return x + ops.stop_gradient(quantized - x)


def _abs_max(x: Any, axis: Any) -> Any:
    outputs, scale = keras.quantizers.abs_max_quantize(x, axis=axis)
    return _straight_through(x, ops.cast(outputs, x.dtype) / scale)


def _by_object(x: Any) -> Any:
    outputs, scale = keras.quantizers.AbsMaxQuantizer(axis=-1)(x)
    return _straight_through(x, ops.cast(outputs, x.dtype) / scale)


def _amax(x: Any) -> Any:
    history = keras.quantizers.compute_float8_amax_history(x, ops.ones((4,)))
    return x / ops.max(history)


def _scaled(x: Any) -> Any:
    scale = keras.quantizers.compute_float8_scale(ops.max(ops.abs(x)), 1.0, 448.0)
    return x * ops.stop_gradient(scale)


_register(
    "quantizers",
    {
        "AbsMaxQuantizer": _applied(_by_object),
        "abs_max_quantize": _applied(lambda x: _abs_max(x, -1)),
        "abs_max_quantize/of the batch": _applied(lambda x: _abs_max(x, 0)),
        "compute_float8_amax_history": _applied(_amax),
        "compute_float8_scale": _applied(_scaled),
        "fake_quant_with_min_max_vars": _applied(
            lambda x: keras.quantizers.fake_quant_with_min_max_vars(x, -2.0, 2.0)
        ),
        "fake_quant_with_min_max_vars/of the batch": _applied(
            lambda x: keras.quantizers.fake_quant_with_min_max_vars(x, ops.min(x), ops.max(x))
        ),
    },
)


# Distillation.


class _Correlating(keras.distillation.DistillationLoss):
    """Compares the similarities between rows."""

    def compute_loss(self, teacher_outputs, student_outputs, **kwargs):
        def relations(x):
            return ops.matmul(x, ops.transpose(x))

        return ops.mean(ops.square(relations(teacher_outputs) - relations(student_outputs)))


def _distilled(loss: Callable[[], Any]) -> Training:
    def network(name: str) -> keras.Model:
        inputs = keras.Input((4,))
        hidden = layers.Dense(5, "tanh", name=f"{name}_hidden")(inputs)
        return keras.Model(inputs, layers.Dense(3, name=f"{name}_logits")(hidden))

    return Training(
        lambda: keras.distillation.Distiller(
            network("teacher"), network("student"), distillation_losses=loss()
        ),
        lambda: (numbers(ROWS, 4), integers(3, ROWS)),
        lambda: {
            "optimizer": adam(),
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
        },
    )


def _features() -> Any:
    return keras.distillation.FeatureDistillation(
        teacher_layer_name="teacher_hidden", student_layer_name="student_hidden"
    )


_register(
    "distillation",
    {
        "DistillationLoss": _distilled(_Correlating),
        "Distiller": _distilled(
            lambda: [keras.distillation.LogitsDistillation(temperature=2.0), _features()]
        ),
        "FeatureDistillation": _distilled(_features),
        "LogitsDistillation": _distilled(
            lambda: keras.distillation.LogitsDistillation(temperature=3.0, loss="mse")
        ),
    },
)


# Applications: the smallest model of each family, in float64.
#
# Their gradients explode when `BatchNormalization` sees few elements of a channel: in one process,
# an initial weight of DenseNet121 that differs by one unit in the last place then changes trained
# weights by 1e5. So the batch is not too small, and the gradients are clipped.


def _application(name: str, size: int) -> Program:
    return Training(
        lambda: getattr(keras.applications, name)(
            weights=None, input_shape=(size, size, 3), classes=3
        ),
        lambda: (fractions(ROWS, size, size, 3).astype("float64"), integers(3, ROWS)),
        lambda: {
            "optimizer": keras.optimizers.SGD(0.3, global_clipnorm=1.0),
            "loss": "sparse_categorical_crossentropy",
        },
        double=True,
    )


_SIZES = {
    "ConvNeXtTiny": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "NASNetMobile": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "VGG19": 32,
    "Xception": 71,
}

_register("applications", {name: _application(name, size) for name, size in _SIZES.items()})


# Models, files and other parts of a step.


def _through(convert: Callable[[keras.Model, pathlib.Path], keras.Model]) -> Program:
    """Trains a model, converts it to another one in the scope, and trains that one."""

    def program(strategy: Any) -> dict[str, Any]:
        with scope(strategy):
            model = _sequential(layers.Dense(5, "tanh"), layers.Dropout(0.3, seed=2))
            model.compile(adam(), "mse")
        x, y = numbers(ROWS, 4), numbers(ROWS, 2, seed=9)
        settings = {"batch_size": BATCH, "shuffle": False}
        first = fit(model, x, y, **settings)
        with shared_folder(strategy) as folder:
            with scope(strategy):
                other = convert(model, folder)
                if not other.compiled:
                    other.compile(adam(), "mse")
            second = fit(other, x, y, **settings)
        return outcome(other, [first, second])

    return program


def _loaded(model: keras.Model, folder: pathlib.Path) -> keras.Model:
    path = folder / "model.keras"
    model.save(path)
    return keras.models.load_model(path)


def _saved_by_function(model: keras.Model, folder: pathlib.Path) -> keras.Model:
    path = folder / "model.keras"
    keras.saving.save_model(model, path)
    return keras.saving.load_model(path)


def _with_loaded_weights(model: keras.Model, folder: pathlib.Path) -> keras.Model:
    path = folder / "model.weights.h5"
    keras.saving.save_weights(model, path)
    other = keras.models.clone_model(model)
    keras.saving.load_weights(other, path)
    return other


def _edited(model: keras.Model, folder: pathlib.Path) -> keras.Model:
    path = folder / "model.weights.h5"
    model.save_weights(path)
    editor = keras.saving.KerasFileEditor(str(path))
    assert len(editor.weights_dict)
    other = keras.models.clone_model(model)
    other.load_weights(path, skip_mismatch=True)
    return other


def _with_copied_weights(
    convert: Callable[[keras.Model], keras.Model],
) -> Callable[[keras.Model, pathlib.Path], keras.Model]:
    def copy(model: keras.Model, folder: pathlib.Path) -> keras.Model:
        other = convert(model)
        other.set_weights(model.get_weights())
        return other

    return copy


def _functional() -> keras.Model:
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, "tanh")(inputs)
    return keras.Model(inputs, [layers.Dense(2)(hidden)])


_register(
    "models",
    {
        "Model": _trained(_functional),
        "Sequential": _with_layer(lambda: layers.Dense(4, "tanh")),
        "clone_model": _through(lambda model, folder: keras.models.clone_model(model)),
        "clone_model/weights": _through(_with_copied_weights(keras.models.clone_model)),
        "load_model": _through(_loaded),
        "model_from_json": _through(
            _with_copied_weights(lambda model: keras.models.model_from_json(model.to_json()))
        ),
        "save_model": _through(_saved_by_function),
    },
)

_register(
    "saving",
    {
        "KerasFileEditor": _through(_edited),
        "load_model": _through(_saved_by_function),
        "load_weights": _through(_with_loaded_weights),
        "save_model": _through(_saved_by_function),
        "save_weights": _through(_with_loaded_weights),
    },
)


def _exported(strategy: Any) -> dict[str, Any]:
    """Trains and exports a model, and runs the exported model after loading it."""
    with scope(strategy):
        model = _sequential(layers.Dense(5, "tanh"), layers.BatchNormalization())
        model.compile(adam(), "mse")
    x, y = numbers(ROWS, 4), numbers(ROWS, 2, seed=9)
    history = fit(model, x, y, batch_size=BATCH, shuffle=False)
    with shared_folder(strategy) as folder:
        model.export(folder / "served", verbose=False)
        wait(strategy)
        loaded = tf.saved_model.load(folder / "served")
        served = loaded.serve(x).numpy()
    return outcome(model, history, served=served)


_register("export", {"ExportArchive": _exported})


class _Rooted(layers.Layer):
    """Uses classes of Keras's root module in its step."""

    def __init__(self):
        super().__init__()
        inputs = keras.Input((4,))
        self.function = keras.Function(inputs, ops.tanh(ops.square(inputs) + inputs))
        self.factor = keras.Variable(0.5, name="factor")
        self.calls = keras.Variable(0, trainable=False, dtype="int32")
        self.input_spec = keras.InputSpec(ndim=2, axes={-1: 4})

    def call(self, x):
        with keras.name_scope("rooted"), keras.device("cpu:0"):
            self.calls.assign_add(ops.shape(x)[0])
            return self.factor * self.function(x)


class _Scaling(keras.Operation):
    def call(self, x):
        return x * ops.sigmoid(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class Stateless(keras.Model):
    """Computes its loss from variables that are passed in."""

    def __init__(self):
        super().__init__()
        self.network = _sequential(layers.Dense(4, "tanh"), layers.BatchNormalization())

    def call(self, x, training=False):
        return self.network(x, training=training)

    def train_step(self, data):
        x, y = keras.utils.unpack_x_y_sample_weight(data)[:2]
        weights = self.network.trainable_variables
        with tf.GradientTape() as tape:
            values = [tf.convert_to_tensor(w.value) for w in weights]
            tape.watch(values)
            others = [tf.convert_to_tensor(v.value) for v in self.network.non_trainable_variables]
            p, others = self.network.stateless_call(values, others, x, training=True)
            loss = ops.sqrt(ops.mean(ops.square(y - p)))
        for variable, value in zip(self.network.non_trainable_variables, others, strict=True):
            variable.assign(value)
        self.optimizer.apply(tape.gradient(loss, values), weights)
        return {"loss": loss}


def _checkpointed() -> keras.Model:
    inputs = keras.Input((4,))
    block = _sequential(layers.Dense(6, "tanh"))
    return keras.Model(inputs, _Applying(keras.remat(lambda x: ops.tanh(x) * 2))(block(inputs)))


def _in_a_remat_scope() -> keras.Model:
    with keras.RematScope(mode="activations"):
        return _sequential(layers.Dense(6, "tanh"), layers.Dense(6, "tanh"))


_register(
    "keras",
    {
        "Function": _trained(lambda: _sequential(_Rooted())),
        "Operation": _trained(lambda: _sequential(_Applying(_Scaling()))),
        "RematScope": _trained(_in_a_remat_scope),
        "StatelessScope": Training(
            Stateless,
            lambda: (numbers(ROWS, 4), numbers(ROWS, 2, seed=9)),
            lambda: {"optimizer": adam(), "loss": "mse"},
        ),
        "Variable": _trained(lambda: _sequential(_Rooted())),
        "remat": _trained(_checkpointed),
    },
)


# Utilities.


def _boxes() -> np.ndarray:
    corners = 12 * fractions(ROWS, 2, 2)
    return np.concatenate([corners, corners + 2 + 5 * fractions(ROWS, 2, 2, seed=1)], axis=-1)


def _of_boxes(compute: Callable[[Any, Any], Any]) -> Training:
    """Trains a dense layer that moves two boxes in each row."""

    def create() -> keras.Model:
        boxes = keras.Input((2, 4))
        return keras.Model(boxes, boxes + layers.Dense(4)(layers.Normalization()(boxes)))

    return _trained(create, _boxes, _boxes, loss=compute)


def _moves(boxes: Any) -> list[Any]:
    """Returns the angle, the translations, the scale and the shears of each row."""
    return [ops.full_like(boxes[:, 0, 0], by) for by in (10.0, 0.1, 0.05, 1.1, 5.0, 3.0)]


_iou = keras.utils.bounding_boxes

_register(
    "utils.bounding_boxes",
    {
        "compute_ciou": _of_boxes(lambda y, p: 1 - _iou.compute_ciou(y, p, "xyxy")),
        "compute_iou": _of_boxes(lambda y, p: ops.mean(1 - _iou.compute_iou(y, p, "xyxy"))),
        "compute_iou/of all rows": _of_boxes(
            lambda y, p: (
                1
                - ops.mean(
                    _iou.compute_iou(ops.reshape(y, (-1, 4)), ops.reshape(p, (-1, 4)), "xyxy")
                )
            )
        ),
        "convert_format": _of_boxes(
            lambda y, p: ops.square(
                _iou.convert_format(y, "xyxy", "center_xywh")
                - _iou.convert_format(p, "xyxy", "center_xywh")
            )
        ),
        "clip_to_image_size": _of_boxes(
            lambda y, p: ops.square(
                y - _iou.clip_to_image_size({"boxes": p, "labels": p[..., 0]}, 9, 9)["boxes"]
            )
        ),
        "encode_box_to_deltas": _of_boxes(
            lambda y, p: ops.square(
                _iou.encode_box_to_deltas(y, y + 1, "xyxy", "xyxy")
                - _iou.encode_box_to_deltas(y, p, "xyxy", "xyxy")
            )
        ),
        "decode_deltas_to_boxes": _of_boxes(
            lambda y, p: ops.square(
                y - _iou.decode_deltas_to_boxes(y[0], p / 10 - y / 10, "xyxy", "xyxy")
            )
        ),
        "affine_transform": _of_boxes(
            lambda y, p: ops.square(y - _iou.affine_transform(p, *_moves(p), 20, 20))
        ),
        "crop": _of_boxes(lambda y, p: ops.square(y - _iou.crop(p, 2, 3, 9, 9))),
        "pad": _of_boxes(lambda y, p: ops.square(y - _iou.pad(p, 2, 3))),
    },
)


def _of_dataset(create: Callable[[], Any]) -> Program:
    def program(strategy: Any) -> dict[str, Any]:
        with scope(strategy):
            model = _sequential(layers.Dense(5, "tanh"))
            model.compile(adam(), "mse", metrics=["mae"])
        history = fit(model, create())
        tested = model.evaluate(create(), verbose=0, return_dict=True)
        return outcome(model, history, evaluated=tested)

    return program


def _series() -> Any:
    series = numbers(40)
    return keras.utils.timeseries_dataset_from_array(
        series[:-4], series[4:, None].repeat(2, axis=1), 4, batch_size=BATCH, shuffle=True, seed=3
    )


def _by_rows(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Makes workers divide batches rather than files, for the same batches on any number."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return dataset.with_options(options)


def _images(folder: pathlib.Path) -> tf.data.Dataset:
    for i, image in enumerate(fractions(ROWS, 3, 4, 3)):
        keras.utils.save_img(folder / f"{i % 3}" / f"{i}.png", image)
    return keras.utils.image_dataset_from_directory(
        folder, image_size=(4, 4), batch_size=BATCH, label_mode="categorical", seed=3
    )


def _texts(folder: pathlib.Path) -> tf.data.Dataset:
    for i, words in enumerate(integers(6, ROWS, 5)):
        (folder / f"{i % 3}" / f"{i}.txt").write_text(" ".join(f"word{word}" for word in words))
    dataset = keras.utils.text_dataset_from_directory(
        folder, batch_size=BATCH, label_mode="categorical", seed=3
    )
    vectors = layers.TextVectorization(8, output_mode="count")
    vectors.adapt([" ".join(f"word{word}" for word in range(6))])
    return dataset.map(lambda x, y: (vectors(x), y))


def _sounds(folder: pathlib.Path) -> tf.data.Dataset:
    for i, sound in enumerate(fractions(ROWS, 20, 1)):
        content = tf.audio.encode_wav(sound - 0.5, 8000).numpy()
        (folder / f"{i % 3}" / f"{i}.wav").write_bytes(content)
    dataset = keras.utils.audio_dataset_from_directory(
        folder, batch_size=BATCH, label_mode="categorical", output_sequence_length=16, seed=3
    )
    return dataset.map(lambda x, y: (tf.ensure_shape(x, (None, 16, 1)), y))


def _of_files(create: Callable[[pathlib.Path], tf.data.Dataset]) -> Program:
    def program(strategy: Any) -> dict[str, Any]:
        with shared_folder(strategy) as folder:
            for label in range(3):
                (folder / f"{label}").mkdir(exist_ok=True)
            dataset = _by_rows(create(folder))
            wait(strategy)
            shape = dataset.element_spec[0].shape[1:]
            with scope(strategy):
                model = keras.Sequential(
                    [keras.Input(shape), layers.Flatten(), layers.Dense(3, "softmax")]
                )
                model.compile(adam(), "categorical_crossentropy", metrics=["accuracy"])
            history = fit(model, dataset)
            tested = model.evaluate(dataset, verbose=0, return_dict=True)
        return outcome(model, history, evaluated=tested)

    return program


def _half() -> Any:
    rows = tf.data.Dataset.from_tensor_slices((numbers(ROWS, 4), numbers(ROWS, 2, seed=9)))
    return keras.utils.split_dataset(rows, left_size=0.7)[0].batch(7)


def _space() -> keras.utils.FeatureSpace:
    return keras.utils.FeatureSpace(
        features={
            "word": keras.utils.FeatureSpace.string_categorical(num_oov_indices=0),
            "number": keras.utils.FeatureSpace.float_normalized(),
        },
        output_mode="concat",
    )


def _with_a_space(strategy: Any) -> dict[str, Any]:
    words = tf.gather(["a", "b", "c"], integers(3, ROWS, 1))
    data = {"word": words, "number": tf.constant(3 * numbers(ROWS, 1))}
    with scope(strategy):
        space = _space()
        space.adapt(tf.data.Dataset.from_tensor_slices(data))
        encoded = space.get_encoded_features()
        outputs = layers.Dense(1)(layers.Dense(4, "tanh")(encoded))
        model = keras.Model(space.get_inputs(), outputs)
        model.compile(adam(), "mse")
    history = fit(model, data, numbers(ROWS, 1, seed=9), batch_size=BATCH, shuffle=False)
    single = {name: column[:1] for name, column in data.items()}
    predicted = [model.predict(part, verbose=0) for part in (data, single)]
    return outcome(model, history, predicted=predicted)


class Unpacking(keras.Model):
    def train_step(self, data):
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        return super().train_step(keras.utils.pack_x_y_sample_weight(x, 2 * y, w))


def _unpacking() -> keras.Model:
    inputs = keras.Input((4,))
    return Unpacking(inputs, layers.Dense(2)(inputs))


_register(
    "utils",
    {
        "FeatureSpace": _with_a_space,
        "audio_dataset_from_directory": _of_files(_sounds),
        "image_dataset_from_directory": _of_files(_images),
        "normalize": _trained(
            lambda: _sequential(layers.Dense(4)),
            lambda: keras.utils.normalize(numbers(ROWS, 4), axis=-1),
        ),
        "pack_x_y_sample_weight": Training(
            _unpacking,
            lambda: (numbers(ROWS, 4), numbers(ROWS, 2, seed=9), row_weights()),
            lambda: {"optimizer": adam(), "loss": "mse"},
        ),
        "split_dataset": _of_dataset(_half),
        "text_dataset_from_directory": _of_files(_texts),
        "timeseries_dataset_from_array": _of_dataset(_series),
        "to_categorical": _trained(
            lambda: _sequential(layers.Dense(4)),
            y=lambda: keras.utils.to_categorical(integers(2, ROWS), 2),
        ),
    },
)


# Wrappers of scikit-learn.


def _estimated(name: str) -> Program:
    def create(X: Any, y: Any = None) -> keras.Model:
        outputs = 3 if name == "SKLearnClassifier" else 1
        last = "softmax" if name == "SKLearnClassifier" else None
        model = keras.Sequential(
            [keras.Input((X.shape[1],)), layers.Dense(5, "tanh"), layers.Dense(outputs, last)]
        )
        loss = "categorical_crossentropy" if name == "SKLearnClassifier" else "mse"
        model.compile(adam(), loss)
        return model

    def program(strategy: Any) -> dict[str, Any]:
        settings = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        estimator = getattr(keras.wrappers, name)(create, fit_kwargs=settings)
        x = numbers(ROWS, 4)
        y = integers(3, ROWS) if name == "SKLearnClassifier" else numbers(ROWS, seed=9)
        with scope(strategy):
            estimator.fit(x, y)
        found = estimator.transform(x) if name == "SKLearnTransformer" else estimator.predict(x)
        return outcome(estimator.model_, dict(estimator.history_.history), found=found)

    return program


_register("wrappers", {name: _estimated(name) for name in public_classes(keras.wrappers, object)})


DEFAULT: list[str] = []


def public_modules() -> Iterator[tuple[str, ModuleType]]:
    """The public modules of Keras by name; "keras" is the first."""
    yield "keras", keras
    known = {keras}
    queue = [("", keras)]
    while queue:
        prefix, module = queue.pop(0)
        for name, value in sorted(vars(module).items()):
            public = not name.startswith("_") and name not in ("src", "legacy")
            of_keras = inspect.ismodule(value) and value.__name__.startswith("keras.")
            if of_keras and public and value not in known:
                known.add(value)
                queue.append((f"{prefix}{name}.", value))
                yield prefix + name, value


def public_symbols() -> set[str]:
    """The public classes and functions of all modules, as "module.name"."""
    return {
        f"{prefix}.{name}"
        for prefix, module in public_modules()
        for name in (*public_classes(module, object), *public_functions(module))
    }


# Modules with a part, or a test, of their own.
_ELSEWHERE = ("callbacks", "layers", "losses", "metrics", "ops", "optimizers")


def missing() -> set[str]:
    """The public symbols without a program here, except in modules that have their own part.

    A class or function that has a program under one public name needs none under another.
    """
    known = {name.partition("/")[0] for name in PROGRAMS}
    modules = dict(public_modules())

    def symbol(name: str) -> Any:
        module, _, last = name.rpartition(".")
        return getattr(modules[module], last)

    others = {f"{module}.{name}" for module in _ELSEWHERE for name in vars(modules[module])}
    covered = {id(symbol(name)) for name in known | others}
    return {name for name in public_symbols() if id(symbol(name)) not in covered}
