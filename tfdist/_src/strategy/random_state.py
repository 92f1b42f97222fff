"""The chief's random states, shared by all workers."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.group.group import Group
from tfdist._src.internals.tensorflow import global_seed


def random_states() -> dict[str, Any]:
    """The states of Python's and NumPy's global generators, which JSON can represent."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, internal, gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Sets both generators to states from `random_states`."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))


def share_randomness(group: Group) -> None:
    """Gives all workers the chief's random states, so that they shuffle in the same order.

    Covers Python's `random`, NumPy's global generator and TensorFlow's seed, which determine how
    arrays and datasets are shuffled. Workers with the same seeds are left unchanged.
    """
    if group.topology.size == 1:
        return
    states = {**random_states(), "tensorflow": random.SystemRandom().randrange(2**31)}
    own = json.dumps(states) if group.topology.is_chief else ""
    chief = json.loads(group.exchange("random state", own)[0])
    set_random_states(chief)
    seeds = group.exchange("seed", str(global_seed()))
    if seeds[0] == "None" or len(set(seeds)) > 1:
        tf.random.set_seed(chief["tensorflow"] if seeds[0] == "None" else int(seeds[0]))
