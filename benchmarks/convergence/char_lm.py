"""The task `char_lm`: trains the model of the example `char_lm.py` with its data and optimizer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from absl import flags

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import char_lm

from benchmarks.convergence.job import Outcome
from benchmarks.convergence.recipes import brings_momentum

BATCH = 64


def train(strategy: Any, codec: Any, rate: float, steps: int, seed: int) -> Outcome:
    """Trains with Adam.

    If the codec applies momentum itself, Adam's momentum is 0.

    Args:
        strategy: a strategy that compresses the gradients with the codec.
        codec: the codec with its settings; None for exact training.
        rate: the factor by which the example's learning rate is multiplied.
        steps: the number of steps.
        seed: the seed of the initial weights and of the batches.

    Returns:
        The loss on held-out modules of the standard library, and the weights.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS([sys.argv[0]])  # Sets the example's flags to their defaults.
    flags.FLAGS.seed = seed
    keras.utils.set_random_seed(seed)
    text = char_lm.read_library()
    seen, unseen = np.split(text, [len(text) * 9 // 10])
    with strategy.scope():
        model = char_lm.build_model()
        momentum = {"momentum": 0.0} if brings_momentum(codec) else {}
        rate *= flags.FLAGS.learning_rate
        optimizer = char_lm.make_optimizer(rate, steps, **momentum)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    pieces = char_lm.draw(seen, steps * BATCH)
    model.fit(*pieces, batch_size=BATCH, shuffle=False, verbose=0)
    held_out = model.evaluate(*char_lm.draw(unseen, 1024), batch_size=256, verbose=0)
    return Outcome({"held out": held_out}, model.get_weights())
