"""The allowed differences from one process, and the public symbols without a program."""

from __future__ import annotations

import fnmatch
import functools
import pathlib
import re

# By part: the public classes and functions of Keras without a program, or patterns of their names,
# and why.
WITHOUT_A_PROGRAM: dict[str, dict[str, str]] = {
    "layers": {
        "FlaxLayer": "needs JAX, which TensorFlow does not install",
        "InputLayer": "is a part of every functional model",
        "JaxLayer": "needs JAX, which TensorFlow does not install",
        "TFSMLayer": "runs a saved model, which is not trained",
        "TorchModuleWrapper": "needs PyTorch as the backend",
    },
    "losses": {},
    "metrics": {},
    "optimizers": {},
    "callbacks": {
        "OrbaxCheckpoint": "needs Orbax, which is not installed; tests/strategy/test_writers.py",
    },
    "components": {
        "applications.*.decode_predictions": "computes outside of models",
        "applications.*.preprocess_input": "computes outside of models",
        **{
            f"applications.*{family}*": "is a larger model of the family"
            for family in ("ConvNeXt", "DenseNet", "EfficientNet", "MobileNet", "NASNet", "ResNet")
        },
        "backend.*": "reads or sets an option of the process, or tells a type",
        "config.*": "reads or sets an option of the process",
        "datasets.*": "downloads data",
        "distribution.*": "has no backend in TensorFlow",
        "dtype_policies.AWQDTypePolicy": "needs a tokenizer and calibration data",
        "dtype_policies.GPTQDTypePolicy": "needs a tokenizer and calibration data",
        "initializers.STFT": "is the kernel of layers:STFTSpectrogram",
        "keras.KerasTensor": "stands for a tensor while a model is built",
        "keras.Quantizer": "is the base class of AbsMaxQuantizer",
        "keras.SymbolicScope": "computes shapes only",
        "keras.device": "is part of keras.Function",
        "keras.name_scope": "is part of keras.Function",
        "keras.version": "tells the version",
        "mixed_precision.*": "sets an option of the process; half precision has other roundings",
        "ops.image.*": "tests/global_view/test_keras_operations.py",
        "preprocessing.*": "prepares data outside of models",
        "quantizers.*Config": "configures what dtype_policies:* runs",
        "quantizers.Quantizer": "is the base class of AbsMaxQuantizer",
        "quantizers.*_int4": "is part of dtype_policies.Int4DTypePolicy",
        "quantizers.abs_max_quantize_grouped_with_zero_point": "computes outside of steps",
        "quantizers.quantize_and_dequantize": "is part of QuantizedFloat8DTypePolicy",
        "saving.*": "names and serializes objects",
        "tree.*": "handles structures in Python",
        **dict.fromkeys(
            (
                *("utils.Config", "utils.CustomObjectScope", "utils.*_keras_*", "utils.*object*"),
                *("utils.get_registered_name", "utils.get_source_inputs", "utils.set_random_seed"),
                *("utils.standardize_dtype", "utils.clear_session", "utils.*_logging*"),
            ),
            "names and serializes objects, or sets an option of the process",
        ),
        **dict.fromkeys(
            ("utils.*img*", "utils.get_file", "utils.pad_sequences"),
            "prepares data outside of models",
        ),
        **dict.fromkeys(("utils.Progbar", "utils.model_to_dot", "utils.plot_model"), "prints"),
        "utils.PyDataset": "is a form of data:*",
        "utils.unpack_x_y_sample_weight": "is part of utils.pack_x_y_sample_weight",
        "visualization.*": "draws",
    },
}


def unexpected(part: str, missing: set[str]) -> set[str]:
    """Returns the symbols without a program that the table above does not contain."""
    patterns = WITHOUT_A_PROGRAM[part]
    return {name for name in missing if not any(fnmatch.fnmatchcase(name, p) for p in patterns)}


def unused(part: str, missing: set[str]) -> list[str]:
    """Returns the patterns of the table above that match no symbol."""
    return [p for p in WITHOUT_A_PROGRAM[part] if not fnmatch.filter(missing, p)]


_DOCUMENTED = pathlib.Path(__file__).parents[2] / "docs" / "guide" / "keras.md"
_HEADING = "## Where several workers differ from one process"


def pattern_of(name: str) -> str | None:
    """Returns the pattern in `differences()` that allows a program to differ, or None."""
    return next((p for p in differences() if fnmatch.fnmatchcase(name, p)), None)


@functools.cache
def differences() -> dict[str, str]:
    """Returns the reasons why programs differ from one process or fail, by patterns of their names.

    The reasons are in the documentation's table. Its first column contains the symbols, such as
    `keras.layers.X`. Rows whose second column begins with "exact" are not differences.
    """
    section = _DOCUMENTED.read_text().partition(_HEADING)[2].partition("\n## ")[0]
    found = {}
    for row in re.findall(r"^\| (.*) \|$", section, re.MULTILINE):
        what, why, *_ = row.split(" | ")
        for part, symbol in re.findall(r"`keras\.(\w+)\.(\w+)`", what):
            if not why.startswith("exact"):
                found[f"{part}:{symbol}*"] = why
    return found
