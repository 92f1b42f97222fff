"""Keras's private names: what the hooks of `tfdist.trainer` replace."""

from __future__ import annotations

from keras.src.backend.tensorflow.optimizer import TFOptimizer as TensorFlowOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as losses
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

__all__ = [
    "BaseOptimizer",
    "LossScaleOptimizer",
    "TensorFlowOptimizer",
    "TensorFlowTrainer",
    "losses",
]
