"""The methods of `PipelineModel` that concern the full model: files, weights, summary."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from tfdist._src.keras.saving.compression_files import load_state
from tfdist._src.keras.saving.files import InStages
from tfdist._src.pipeline.partition.cost_model import estimate
from tfdist._src.pipeline.partition.cut import Partition
from tfdist._src.pipeline.partition.summary import summary
from tfdist._src.pipeline.state.saving import Files


@dataclasses.dataclass
class Untracked:
    """Hides the full model from Keras's tracking.

    Attributes:
        full_model: the ordinary model.
        partition: its partition into stages.
        remat: whether backward passes recompute the forward pass.
        files: saves and loads it.
        by_time: whether it was cut by the time that its layers take.
        compiled: the arguments that it was compiled with.
    """

    full_model: keras.Model
    partition: Partition
    remat: bool
    files: Files
    by_time: bool
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)


class FullModel(InStages, keras.Model):  # type: ignore[misc]
    """The part of `PipelineModel` whose methods all workers call, each contributing its stages."""

    _untracked: Untracked

    @property
    def partition(self) -> Partition:
        """The stages."""
        return self._untracked.partition

    def full_model(self) -> contextlib.AbstractContextManager[keras.Model | None]:
        """Yields the ordinary model with all values on the chief, None elsewhere.

        All workers must call it, as they must `save`, `save_weights` and `export`, which write this
        model.

        Example:
            ```python
            with model.full_model() as full:
                if full is not None:
                    print(full.layers[0].get_weights())
            ```
        """
        optimizer = getattr(self, "optimizer", None)
        return self._untracked.files.full_model(optimizer, self._untracked.compiled)

    @property
    def holds_last_stage(self) -> bool:
        """Whether this worker computes the loss and the metrics."""
        strategy = self.distribute_strategy
        return bool(strategy.pipeline_rank_of(strategy.stages - 1) == strategy.pipeline_rank)

    @property
    def is_cut_by_time(self) -> bool:
        """Whether the stages depend on the time that its layers take on the chief."""
        return self._untracked.by_time

    def held_variables(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """This worker's weights and slots, named as in the full model; for snapshots."""
        return self._untracked.files.held(getattr(self, "optimizer", None))

    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> None:
        """Like `keras.Model.load_weights`; each worker loads its part of the full model's file.

        The file may have been saved by any number of workers or by a single process. As in Keras,
        the optimizer's state is loaded too if the optimizer is built; see `load_optimizer`.

        Args:
            filepath: a `.keras`, `.weights.h5` or other file that `keras.Model.load_weights`
                accepts.
            skip_mismatch: whether to skip layers whose weights differ in shape.
            **kwargs: as for `keras.Model.load_weights`.

        Raises:
            ValueError: the file is from another model.
        """
        options = {"skip_mismatch": skip_mismatch, **kwargs}
        if self._untracked.files.load(filepath, getattr(self, "optimizer", None), **options):
            load_state(self, filepath)

    def load_optimizer(self, filepath: Any) -> None:
        """Loads the optimizer's state from a file of the full model, to resume training.

        All workers must call it, after `compile`.

        Args:
            filepath: a file written by `save` or `save_weights` of the compiled model, on any
                number of workers or in a single process.

        Raises:
            ValueError: the file has no state for such an optimizer, or the model is not compiled.

        Example:
            ```python
            with strategy.scope():
                model = tfdist.PipelineModel(lambda: keras.models.load_model("model.keras"))
                model.compile("adam", "mse")
            model.load_optimizer("model.keras")
            ```
        """
        if getattr(self, "optimizer", None) is None:
            raise ValueError(
                "Loading an optimizer's state requires a compiled model. Received: a model without "
                "an optimizer. Call `compile` first."
            )
        if not self.optimizer.built:
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        self._untracked.files.load_optimizer(filepath, self.optimizer)
        load_state(self, filepath)

    def get_weights(self) -> list[Any]:
        """The full model's weights as arrays, on every worker; all workers must call it."""
        return self._untracked.files.get_weights()

    def set_weights(self, weights: Any) -> None:
        """Sets this worker's values from weights of the full model, as `get_weights` returns them.

        Raises:
            ValueError: the weights do not match the model.
        """
        self._untracked.files.set_weights(weights)

    def get_config(self) -> dict[str, Any]:
        """Not supported: a PipelineModel is made from another model and a strategy.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "A PipelineModel has no config and cannot be cloned. Use the ordinary model's: `with "
            "model.full_model() as full`, on the chief."
        )

    def count_params(self) -> int:
        """The number of scalar weights in the full model."""
        return int(self._untracked.full_model.count_params())

    def summary(self, *args: Any, print_fn: Callable[[str], Any] | None = None, **kw: Any) -> None:
        """Prints the full model as `keras.Model.summary` does, and a table of its stages.

        If the model was cut by hand, the stages' shares of the cost are estimates.
        """
        self._untracked.full_model.summary(*args, print_fn=print_fn, **kw)
        partition = self.partition
        seconds = partition.seconds or [c.seconds for c in estimate(partition.graph, rows=1)]
        (print_fn or print)("\n".join(summary(partition, seconds)))
