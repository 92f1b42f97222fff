"""Keras's private names: what the hooks of `tfdist.trainer` replace."""

from __future__ import annotations

from keras.src.backend.tensorflow import random
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer as TensorFlowOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as losses
from keras.src.models.model import Model
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.saving import saving_lib

__all__ = [
    "BaseOptimizer",
    "LossScaleOptimizer",
    "Model",
    "TensorFlowOptimizer",
    "TensorFlowTrainer",
    "Variable",
    "legacy_h5_format",
    "losses",
    "random",
    "saving_lib",
]
