"""A callback that warms up the learning rate."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any

import tensorflow as tf

from tfdist._src.group import joined_group
from tfdist._src.internals.optimizer import batches_of, scaled_learning_rate, updating_optimizers
from tfdist._src.keras.fit.callback import Callback, GroupInfo
from tfdist._src.keras.fit.training_data import current_data


class LearningRateWarmup(Callback):
    """Raises the learning rate linearly from a fraction to its full value, batch by batch.

    Training with large batches needs large learning rates, but may diverge if it begins with them
    (Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv 1706.02677; the warmup there takes
    five epochs). The learning rate of batch i, counted from 0 by the optimizer, is multiplied by

        initial + (1 - initial) * min(i / steps, 1)

    The multiplication is part of the update, so each batch has its own learning rate, even if
    `steps_per_execution` is larger than 1 or the model has several optimizers. The factor applies
    to the value of the optimizer's schedule, or to a learning rate that `ReduceLROnPlateau`,
    `LearningRateScheduler` or another callback has set. `optimizer.learning_rate` and saved models
    contain the learning rate without the factor.

    Batches are counted as for learning rate schedules: with gradient accumulation, every batch
    counts, and steps that loss scaling skips do not count. If the state of the optimizer is
    restored, the warmup continues where it was. Otherwise it starts over, unless `initial_epoch` is
    past the warmup. Keras retraces the training step when training begins. If training is
    interrupted by an exception, the warmup may stay in effect until another training run with this
    kind of callback ends.

    All workers must pass the same callback. The callback also works in a single process.

    Args:
        steps: the number of batches of the warmup.
        epochs: the number of epochs of the warmup, as an alternative to `steps`. It may be
            fractional. The number of batches in an epoch must be known.
        initial: the factor of batch 0, from 0 to 1. With `scale_by_size`, the default is 1 / the
            number of replicas, as in the paper, so that batch 0 is trained with the optimizer's
            learning rate. Otherwise the default is 0, regardless of the number of replicas.
        scale_by_size: whether to also multiply the learning rate by the number of data-parallel
            replicas, from the first batch to the end of training. This is right only if the global
            batch size, which is passed to `fit`, has been multiplied by the same number. If the
            number of replicas changes while `Elastic(batch="per_worker")` is used, the learning
            rate is multiplied by the new number instead, and the step is retraced. With
            `Elastic(batch="global")`, the learning rate stays the same.
        verbose: 1 prints the factor after each epoch of the warmup, on the chief; 0 does not.

    Raises:
        ValueError: an argument is out of range, or not exactly one of `steps` and `epochs` is
            given; in training, if the number of batches in an epoch is needed but unknown.
        ProgramMismatchError: in training, if the workers have different callbacks of this kind.

    Example:
        ```python
        warmup = tfdist.callbacks.LearningRateWarmup(epochs=5)
        model.fit(dataset, epochs=90, callbacks=[warmup])
        ```
    """

    # Makes `fit` compare the callback's `repr` on all workers.
    same_on_all_workers = True

    def __init__(
        self,
        steps: int | None = None,
        epochs: float | None = None,
        initial: float | None = None,
        scale_by_size: bool = False,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        if (steps is None) == (epochs is None):
            raise ValueError(
                "Exactly one of `steps` and `epochs` must be given. Received: "
                f"steps={steps!r}, epochs={epochs!r}. Pass one of them, such as epochs=5."
            )
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ValueError(
                f"`steps` must be a positive number of batches. Received: {steps!r}. "
                "Pass an integer such as 500."
            )
        if epochs is not None and not (_is_number(epochs) and 0 < epochs < math.inf):
            raise ValueError(
                f"`epochs` must be a positive number. Received: {epochs!r}. Pass one such as 5."
            )
        if initial is not None and not (_is_number(initial) and 0 <= initial <= 1):
            raise ValueError(
                f"`initial` must be a factor between 0 and 1. Received: {initial!r}. "
                "Pass one such as 0.1."
            )
        self._unit = "epochs" if steps is None else "steps"
        self._length: float = steps or epochs or 0
        self._initial, self._scale_by_size = initial, bool(scale_by_size)
        self._verbose = verbose
        self._ramp: _Ramp | None = None
        self._scale: float | None = None  # the scale of the current training run
        self._initial_of_job: float | None = None  # in a job that this worker has joined
        self._is_over = False
        self._scaled = contextlib.ExitStack()

    def __repr__(self) -> str:
        return (
            f"LearningRateWarmup({self._unit}={self._length!r}, initial={self._initial!r}, "
            f"scale_by_size={self._scale_by_size})"
        )

    def on_train_begin(self, logs: Any = None) -> None:
        self._scaled.close()  # It is still open if the previous run was interrupted.
        self._ramp = self._scale = self._initial_of_job = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # The ramp is not created in `on_train_begin`, because other callbacks may still change the
        # first epoch there.
        if self._ramp is not None:
            return
        self._ramp = self._ramp_from(epoch)
        self._is_over = self._ramp.is_flat
        if not self._ramp.is_one:
            self._use(self._ramp)

    def on_group_change(self, old: GroupInfo, new: GroupInfo) -> None:
        """Scales the learning rate by the new number of replicas if the batch size changes too."""
        data, ramp = current_data(), self._ramp
        if not self._scale_by_size or data is None or data.batch_size is None:
            return
        replicas = self._replicas
        if ramp is not None and ramp.target != replicas:
            self._scaled.close()
            initial = self._initial_for(replicas, ramp.initial)
            self._ramp = dataclasses.replace(ramp, initial=initial, target=float(replicas))
            self._use(self._ramp)
        elif self._initial_of_job is not None and self._scale != replicas:
            self._initial_of_job = self._initial_for(replicas, self._initial_of_job)
        self._scale = None

    def _initial_for(self, replicas: int, before: float) -> float:
        """Returns the factor at the start of the ramp, relative to a new number of replicas."""
        return before if before == 1 or self._initial is not None else 1 / replicas

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._ramp is None or self._is_over or not self._verbose:
            return
        batches = batches_of(updating_optimizers(self.model.optimizer)[0]).numpy()
        self._is_over = bool(batches >= self._ramp.steps)
        group = joined_group()
        if group is None or group.topology.is_chief:
            factor = float(self._ramp.factor(batches))
            print(f"\nEpoch {epoch + 1}: LearningRateWarmup has reached the factor {factor:.4g}.")

    def on_train_end(self, logs: Any = None) -> None:
        if self._ramp is not None and not self._ramp.is_one:
            self._scaled.close()
            self.model.make_train_function(force=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the ramp of the learning rate, and the number of replicas."""
        ramp = self._ramp
        scale, initial = (None, None) if ramp is None else (ramp.target, ramp.initial)
        return {"scale": scale, "initial": initial, "replicas": self._replicas}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the scale of this job's workers, or of a job with as many replicas.

        A worker that joins a job also takes over the start of the ramp, because all workers must
        compute the same program.
        """
        group = joined_group()
        same_job = group is not None and group.generation > 0
        if same_job or state["replicas"] == self._replicas:
            self._scale = state["scale"]
        if same_job:
            self._initial_of_job = state["initial"]

    def _use(self, ramp: _Ramp) -> None:
        for optimizer in updating_optimizers(self.model.optimizer):
            factor = functools.partial(ramp.factor, batches_of(optimizer))
            self._scaled.enter_context(scaled_learning_rate(optimizer, factor))
        self.model.make_train_function(force=True)

    def _ramp_from(self, epoch: int) -> _Ramp:
        """Returns the factors for a training run that begins with this epoch."""
        batches = (self.params or {}).get("steps")
        steps = self._length
        if self._unit == "epochs":
            if batches is None:
                raise ValueError(
                    "`epochs` requires a known number of batches in an epoch. Received: "
                    f"epochs={steps!r} with data of unknown length. Pass `steps` instead, or "
                    "`steps_per_epoch` to `fit`."
                )
            steps *= batches
        scale = self._scale or (self._replicas if self._scale_by_size else 1)
        initial = self._initial
        if initial is None:
            initial = 1 / scale if self._scale_by_size else 0.0
        if self._initial_of_job is not None:
            initial = self._initial_of_job
        elif epoch * (batches or 0) >= steps:
            initial = 1.0
        return _Ramp(float(initial), float(steps), float(scale))

    @property
    def _replicas(self) -> int:
        strategy = self.model.distribute_strategy
        return strategy.num_replicas_in_sync if strategy else 1


@dataclasses.dataclass(frozen=True)
class _Ramp:
    """A linear function of the number of batches, from `initial * target` to `target`."""

    initial: float
    steps: float
    target: float

    @property
    def is_flat(self) -> bool:
        return self.initial == 1

    @property
    def is_one(self) -> bool:
        return self.is_flat and self.target == 1

    def factor(self, batches: Any) -> tf.Tensor:
        # In this form of the expression, the factor is exactly `target` at the end, without
        # rounding errors.
        left = tf.maximum(1 - tf.cast(batches, tf.float32) / self.steps, 0)
        return self.target * (1 - (1 - self.initial) * left)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
