"""What other modules' ranks do, with the optimizer shared out beside the pipeline."""

from __future__ import annotations

import functools
import importlib
from unittest import mock

import numpy as np

import tfdist
from tests.strategy.behaviours.common import sgd_with_momentum


def as_elsewhere(strategy, behaviour, *args):
    """Another module's behaviour."""
    module, name = behaviour.split(":")
    function = getattr(importlib.import_module(f"tests.pipeline.{module}"), name)
    with _sharing_out(), sgd_with_momentum():
        return function(strategy, *args)


def state(strategy, name, pipeline):
    """The elements of the state here, and of this rank's stages."""
    from tests.pipeline import saving_behaviours as saving

    example = saving.ZOO[name]
    with _sharing_out():
        model = saving._make(strategy, example.build, pipeline)
    saving._compile(model, example)
    saving._fit(model, *example.batch(saving.ROWS))
    own = sum(int(np.prod(v.shape)) for v in model.optimizer.variables)
    return own, 2 * sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def _sharing_out():
    made = functools.partial(tfdist.HybridStrategy, shard_optimizer=True)
    return mock.patch.object(tfdist, "HybridStrategy", made, create=True)
