"""The differences from one process that are allowed, and what has no program."""

from __future__ import annotations

import fnmatch

# By pattern of programs' names: why their result may differ from that of one process, or why they
# are refused. A program that does not differ must not be here.
DIFFERENCES: dict[str, str] = {
    "layers:AugMix": "chooses by Python's `random` while it is traced, in one process twice",
}

# By part: the public classes and functions of Keras without a program, and why.
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
}


def reason(name: str) -> str | None:
    """Why a program may differ; None if it may not."""
    for pattern, why in DIFFERENCES.items():
        if fnmatch.fnmatchcase(name, pattern):
            return why
    return None
