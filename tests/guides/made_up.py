"""Small made-up data and short trainings, in the place of downloads and of hours."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# As many rows as the data sets have, which scripts name and split; `fit` takes the first few.
PICTURES = {(28, 28): (60000, 10000), (32, 32, 3): (50000, 10000)}
TRAINING, TEST = 25000, 1000
# The last batch of most has one row: fewer than there are workers.
ROWS, BATCHES, EPOCHS = 65, 3, 2
LOOP = 8  # batches of a loop over a dataset


class NeedsData(Exception):
    """A script downloads what nothing here can stand for."""


def install(record: Callable[[str, Any], None]) -> None:
    """Replaces what downloads data, shows pictures or takes long.

    Args:
        record: is told what each call of `fit` and `evaluate` gives.
    """
    install_data()
    iterate = tf.data.Dataset.__iter__

    def iterate_shortly(self: tf.data.Dataset) -> Any:
        by_the_script = sys._getframe(1).f_code.co_filename == sys.argv[0]
        return iterate(self.take(LOOP) if by_the_script else self)

    tf.data.Dataset.__iter__ = iterate_shortly
    for name in ("fit", "evaluate"):
        setattr(keras.Model, name, _short(name, getattr(keras.Model, name), record))


def install_data() -> None:
    """Replaces what downloads data or shows pictures."""
    _install_datasets()
    _install_files()
    _install_modules()
    _install_applications()
    keras.utils.plot_model = lambda *args, **kwargs: None


def _short(name: str, call: Callable[..., Any], record: Callable[[str, Any], None]) -> Any:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def call_shortly(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        short = given.arguments
        for data in ("x", "y", "sample_weight", "validation_data"):
            if data in short:
                short[data] = _first(short[data])
        for number, most in (
            ("epochs", EPOCHS),
            ("steps_per_epoch", BATCHES),
            ("validation_steps", BATCHES),
            ("steps", BATCHES),
        ):
            if isinstance(short.get(number), int):
                short[number] = min(short[number], short.get("initial_epoch", 0) + most)
        if isinstance(short.get("x"), keras.utils.PyDataset):
            short.setdefault("steps_per_epoch" if name == "fit" else "steps", BATCHES)
        result = call(*given.args, **given.kwargs)
        record(name, result.history if name == "fit" else result)
        return result

    return call_shortly


def _first(data: Any) -> Any:
    if isinstance(data, tf.data.Dataset):
        return data.take(BATCHES)
    if isinstance(data, dict):
        return {name: _first(part) for name, part in data.items()}
    if isinstance(data, (list, tuple)) and any(hasattr(part, "shape") for part in data):
        return type(data)(_first(part) for part in data)
    if isinstance(data, list) or (hasattr(data, "shape") and not callable(data)):
        return data[:ROWS]
    return data


def images(count: int, size: tuple[int, ...], classes: int, seed: int = 0) -> Any:
    """Pictures of coarse noise, uint8, and labels of shape (count, 1)."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (count, *(max(1, s // 4) for s in size[:2]), *size[2:]))
    fine = coarse.astype("uint8").repeat(4, axis=1).repeat(4, axis=2)
    return fine, generator.integers(0, classes, (count, 1)).astype("uint8")


def _install_datasets() -> None:
    def pictures(size: tuple[int, ...], classes: int, column: bool) -> Any:
        def load_data(*args: Any, **kwargs: Any) -> Any:
            training, test = PICTURES[size]
            parts = [images(training, size, classes), images(test, size, classes, 1)]
            return tuple((x, y if column else y[:, 0]) for x, y in parts)

        return load_data

    def texts(classes: int) -> Any:
        def load_data(num_words: int | None = None, **kwargs: Any) -> Any:
            generator = np.random.default_rng(0)
            most = min(num_words or 5000, 5000)

            def part(count: int) -> Any:
                rows = np.empty(count, object)
                for i, length in enumerate(generator.integers(5, 60, count)):
                    rows[i] = generator.integers(1, most, length).tolist()
                return rows, generator.integers(0, classes, count)

            return part(TRAINING), part(TEST)

        return load_data

    def prices(*args: Any, **kwargs: Any) -> Any:
        x = np.random.default_rng(0).normal(size=(TRAINING, 13)).astype("float32")
        y = x.sum(axis=1)
        return (x[TEST:], y[TEST:]), (x[:TEST], y[:TEST])

    sets = keras.datasets
    sets.mnist.load_data = sets.fashion_mnist.load_data = pictures((28, 28), 10, False)
    sets.cifar10.load_data = pictures((32, 32, 3), 10, True)
    sets.cifar100.load_data = pictures((32, 32, 3), 100, True)
    sets.imdb.load_data, sets.reuters.load_data = texts(2), texts(46)
    sets.boston_housing.load_data = sets.california_housing.load_data = prices


def _install_files() -> None:
    def get_file(fname: Any = None, origin: Any = None, **kwargs: Any) -> str:
        path = Path(str(fname or origin).rpartition("/")[2]).absolute()
        if path.suffix in (".jpg", ".jpeg", ".png"):
            keras.utils.save_img(path, images(1, (128, 128, 3), 2)[0][0])
        elif path.suffix == ".txt":
            words = np.random.default_rng(0).integers(97, 123, (4000, 5)).astype("uint8")
            path.write_text(" ".join(row.tobytes().decode() for row in words))
        else:
            raise NeedsData(path.name)
        return str(path)

    def image_dataset(
        directory: Any,
        labels: Any = "inferred",
        label_mode: Any = "int",
        batch_size: Any = 32,
        image_size: Any = (256, 256),
        validation_split: Any = None,
        subset: Any = None,
        **kwargs: Any,
    ) -> Any:
        x, y = images(ROWS, (*image_size, 3), 2)
        x = x[:, : image_size[0], : image_size[1]].astype("float32")
        target = {"int": y[:, 0], "binary": y.astype("float32"), "categorical": np.eye(2)[y[:, 0]]}
        parts = x if labels is None or label_mode is None else (x, target[label_mode])
        data = tf.data.Dataset.from_tensor_slices(parts)
        data = data if batch_size is None else data.batch(batch_size)
        if subset == "both":
            return data, data
        data.class_names = ["0", "1"]
        return data

    def text_dataset(directory: Any, batch_size: int = 32, **kwargs: Any) -> Any:
        generator = np.random.default_rng(0)
        lines = [" ".join(map(str, generator.integers(0, 500, 30))) for _ in range(ROWS)]
        labels = generator.integers(0, 2, ROWS).astype("int32")
        return tf.data.Dataset.from_tensor_slices((lines, labels)).batch(batch_size)

    loadtxt = np.loadtxt

    def load_series(fname: Any, *args: Any, **kwargs: Any) -> Any:
        if "://" not in str(fname):
            return loadtxt(fname, *args, **kwargs)
        generator = np.random.default_rng(0)
        labels = generator.choice([-1.0, 1.0], (500, 1))
        return np.concatenate([labels, generator.normal(size=(500, 100))], axis=1)

    def needs_data(command: Any, *args: Any, **kwargs: Any) -> Any:
        raise NeedsData(str(command))

    np.loadtxt = load_series
    keras.utils.get_file = get_file
    keras.utils.image_dataset_from_directory = image_dataset
    keras.preprocessing.image_dataset_from_directory = image_dataset
    keras.utils.text_dataset_from_directory = text_dataset
    os.system = needs_data


def _install_modules() -> None:
    import matplotlib

    matplotlib.use("Agg")
    screen = types.ModuleType("IPython.display")
    screen.Image = screen.display = lambda *args, **kwargs: None
    notebook = types.ModuleType("IPython")
    notebook.display, notebook.version_info = screen, (9, 0)
    notebook.get_ipython = lambda: None
    bars = types.ModuleType("tqdm")
    bars.tqdm = bars.trange = lambda items, *args, **kwargs: (
        range(items) if isinstance(items, int) else items
    )
    sys.modules |= {"IPython": notebook, "IPython.display": screen, "tqdm": bars}


def _install_applications() -> None:
    """Models of `keras.applications` start without trained weights."""

    def untrained(make: Any) -> Any:
        @functools.wraps(make)
        def make_untrained(*args: Any, **kwargs: Any) -> Any:
            return make(*args, **{**kwargs, "weights": None})

        return make_untrained

    for name, make in vars(keras.applications).items():
        if inspect.isfunction(make):
            setattr(keras.applications, name, untrained(make))
    for module in vars(keras.applications).values():
        for name, make in list(vars(module).items()) if inspect.ismodule(module) else []:
            if inspect.isfunction(make) and name[0].isupper():
                setattr(module, name, untrained(make))
