"""Keras's private names: what the hooks of `tfdist.trainer` replace."""

from __future__ import annotations

import keras

if keras.backend.backend() != "tensorflow":
    raise RuntimeError(
        "tfdist needs Keras on its TensorFlow backend. "
        f"Received: KERAS_BACKEND={keras.backend.backend()!r}. "
        "Set the environment variable KERAS_BACKEND=tensorflow before Keras is imported."
    )

from keras.src.backend.tensorflow import random
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer as TensorFlowOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as losses
from keras.src.models.model import Model
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.saving import saving_lib
from keras.src.trainers import data_adapters
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.trainer import Trainer

__all__ = [
    "BaseOptimizer",
    "CompileLoss",
    "LossScaleOptimizer",
    "Model",
    "TFEpochIterator",
    "TensorFlowOptimizer",
    "TensorFlowTrainer",
    "Trainer",
    "Variable",
    "data_adapters",
    "legacy_h5_format",
    "losses",
    "random",
    "saving_lib",
]
