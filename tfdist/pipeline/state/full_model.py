"""What a model in stages offers of the whole: its files, its weights, its summary."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from tfdist.pipeline.partition.cost_model import estimate
from tfdist.pipeline.partition.cut import Partition
from tfdist.pipeline.partition.summary import summary
from tfdist.pipeline.state.saving import Files
from tfdist.trainer.saving.compression_files import load_state
from tfdist.trainer.saving.files import InStages


@dataclasses.dataclass
class Parts:
    """Holds what Keras must not track: the whole model.

    Attributes:
        whole: the model.
        partition: its stages.
        remat: whether backward passes run the forward pass again.
        files: how it is written and read.
        compiled: what it was compiled with.
    """

    whole: keras.Model
    partition: Partition
    remat: bool
    files: Files
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)


class FullModel(InStages, keras.Model):  # type: ignore[misc]
    """A part of `PipelineModel`: all workers call these methods, and each gives its stages."""

    _parts: Parts

    @property
    def partition(self) -> Partition:
        """The stages."""
        return self._parts.partition

    def gathered(self) -> contextlib.AbstractContextManager[keras.Model | None]:
        """The ordinary model with all values, on the chief; None elsewhere. All workers call it.

        `save`, `save_weights` and `export` write it; they too are called by all workers.

        Example:
            ```python
            with model.gathered() as whole:
                if whole is not None:
                    print(whole.layers[0].get_weights())
            ```
        """
        optimizer = getattr(self, "optimizer", None)
        return self._parts.files.gathered(optimizer, self._parts.compiled)

    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> None:
        """As `keras.Model.load_weights`: each worker takes its own from the whole model's file.

        The file may be one that any number of workers has saved, or a single process. As in Keras
        the optimizer's state comes with it if the optimizer is built; see `load_optimizer`.

        Args:
            filepath: ends in `.keras`, `.weights.h5`, or as `keras.Model.load_weights` takes it.
            skip_mismatch: whether to leave layers as they are whose weights are of other shapes.
            **kwargs: as for `keras.Model.load_weights`.

        Raises:
            ValueError: the file is another model's.
        """
        options = {"skip_mismatch": skip_mismatch, **kwargs}
        if self._parts.files.load(filepath, getattr(self, "optimizer", None), **options):
            load_state(self, filepath)

    def load_optimizer(self, filepath: Any) -> None:
        """Takes the optimizer's state from a file of the whole model, to go on with training.

        All workers call it, after `compile`.

        Args:
            filepath: what `save` or `save_weights` of the compiled model wrote, on any number of
                workers or in a single process.

        Raises:
            ValueError: the file has no state of such an optimizer, or the model is not compiled.

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
                "An optimizer's state is for a compiled model. Received: a model without an "
                "optimizer. Call `compile` first."
            )
        if not self.optimizer.built:
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)
        self._parts.files.load_optimizer(filepath, self.optimizer)
        load_state(self, filepath)

    def get_weights(self) -> list[Any]:
        """The whole model's weights as arrays, on every worker; all of them call it."""
        return self._parts.files.get_weights()

    def set_weights(self, weights: Any) -> None:
        """Takes this worker's values from weights of the whole model, as of `get_weights`.

        Raises:
            ValueError: they are another model's.
        """
        self._parts.files.set_weights(weights)

    def get_config(self) -> dict[str, Any]:
        """A model in stages has none: it is made of another one, and of a strategy.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "A model in stages has no configuration, and cannot be cloned. Take those of the "
            "ordinary model: `with model.gathered() as whole`, on the chief."
        )

    def count_params(self) -> int:
        """The number of the whole model's weights, counted as numbers."""
        return int(self._parts.whole.count_params())

    def summary(self, *args: Any, print_fn: Callable[[str], Any] | None = None, **kw: Any) -> None:
        """Prints the whole model as `keras.Model.summary` does, and a table of its stages.

        A stage's share of the cost is estimated where the model was cut by hand.
        """
        self._parts.whole.summary(*args, print_fn=print_fn, **kw)
        partition = self.partition
        seconds = partition.seconds or [c.seconds for c in estimate(partition.graph, rows=1)]
        (print_fn or print)("\n".join(summary(partition, seconds)))
