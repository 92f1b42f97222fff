"""A Keras model in stages, one or more on each worker, that trains under `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals.keras import compiled_loss_of, compiled_metrics_of
from tfdist.pipeline.placement.auto_partition import choose
from tfdist.pipeline.placement.materialize import build, check_free, materialize
from tfdist.pipeline.placement.strategy import HybridStrategy
from tfdist.pipeline.placement.trainability import agree_on_trainable
from tfdist.pipeline.runtime.engine import Engine
from tfdist.pipeline.runtime.train_step import StepRunner
from tfdist.pipeline.simulation.timeline import Timeline
from tfdist.pipeline.state.full_model import FullModel, Parts
from tfdist.pipeline.state.saving import Files, compile_arguments
from tfdist.trainer.fit.call_checks import check_variables
from tfdist.trainer.losses.metrics import take_over_metrics


class PipelineModel(FullModel):
    """An ordinary model whose stages are on the workers of a pipeline.

    It is compiled, fitted, evaluated and used for predictions like the model that it is made of,
    with the results that one process gives. Every worker makes it and calls the same methods.

    Args:
        model: a Sequential or Functional model, or the function that makes it. With a function no
            worker ever holds the variables of the whole model; only what the function reads of a
            file is in the CPU's memory until the model is cut.
        cuts: the names of the layers with which stages end, one less than stages; by default the
            model is cut so that the stages take equally long.
        by: what that is found out by: `"time"`, measured by the chief, or `"parameters"`, an
            estimate.
        remat: whether backward passes run the forward pass again, which saves the memory of
            what it computes in between.

    Raises:
        UnsupportedError: it is made outside of the scope of a pipeline's strategy.
        PartitionError: the model cannot be cut into so many stages.

    Example:
        ```python
        with strategy.scope():
            model = tfdist.PipelineModel(build_model)
            model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(dataset)
        ```
    """

    def __init__(
        self,
        model: keras.Model | Callable[[], keras.Model],
        cuts: Sequence[str] | None = None,
        by: str = "time",
        remat: bool = False,
    ) -> None:
        strategy = tf.distribute.get_strategy()
        if not isinstance(strategy, HybridStrategy):
            raise UnsupportedError(
                "A PipelineModel belongs to a tfdist.PipelineStrategy or tfdist.HybridStrategy. "
                f"Received: {type(strategy).__name__}. Make it inside `with strategy.scope():`."
            )
        whole, made = build(model)
        check_free(whole, made, strategy.extended.group)
        super().__init__(name=whole.name, dtype=whole.dtype_policy)
        partition = choose(whole, strategy, cuts, by)
        mine = [partition.stages[i] for i in strategy.stages_of(strategy.place)]
        materialize(whole.variables, [v for stage in mine for v in stage.variables], made)
        self._parts = Parts(whole, partition, remat, Files(whole, partition, strategy))
        layers = {id(layer): layer for stage in mine for layer in stage.layers}
        self._own_layers = list(layers.values())
        # What a stage's calls read of other layers: a head that is tied to an embedding.
        own = {id(v) for layer in self._own_layers for v in layer.variables}
        read = {id(v): v for stage in mine for v in stage.variables if id(v) not in own}
        self._read_variables = list(read.values())
        if hasattr(whole, "output_names"):
            self.output_names = whole.output_names
        self._steps: StepRunner | None = None
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Runs all stages; only symbolically, as no worker holds all of them.

        Raises:
            UnsupportedError: it is called on values.
        """
        if tf.executing_eagerly() and self.distribute_strategy.pipeline_size > 1:
            raise UnsupportedError(
                "No worker holds a whole model in stages, so it cannot be called. Use `predict`, "
                "or `predict_on_batch`, on all workers."
            )
        graph = self.partition.graph
        values: dict[int, Any] = dict(graph.unpack_inputs(inputs))
        for stage in self.partition.stages:
            values.update(stage(values, training=training))
        return graph.pack_outputs(values)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `keras.Model.compile`; `run_eagerly` and `jit_compile` are not possible."""
        for name in ("run_eagerly", "jit_compile"):
            if kwargs.get(name) is True:
                raise UnsupportedError(
                    f"{name}=True is not possible in a pipeline, whose passes are operations of "
                    "one graph. Leave it out."
                )
        agree_on_trainable(self.partition, self.distribute_strategy)
        self._parts.compiled = compile_arguments(args, kwargs)
        kwargs["jit_compile"] = False
        super().compile(*args, **kwargs)
        self._steps = self._new_steps()

    def timeline_on_batch(self, *args: Any, **kwargs: Any) -> Timeline:
        """Trains on a batch, as `train_on_batch`, and tells when each action ran.

        All workers call it. The first call traces the step anew; the times of the second are those
        of training. Workers on several hosts need clocks that agree.

        Args:
            *args: as of `keras.Model.train_on_batch`.
            **kwargs: likewise.

        Returns:
            The actions of this pipeline's workers, on all workers.

        Example:
            ```python
            from tfdist.pipeline.simulation.gantt import draw

            for _ in range(2):
                timeline = model.timeline_on_batch(x, y)
            draw(timeline, "timeline.png")
            ```
        """
        if self._steps is None:
            raise ValueError("Only a compiled model trains. Call `compile` first.")
        with self._steps.timing() as timed:
            self.train_on_batch(*args, **kwargs)
        return timed()

    def _loss_of(self, y: Any, predictions: Any, sample_weight: Any) -> Any:
        loss = compiled_loss_of(self)
        return None if loss is None else loss(y, predictions, sample_weight)

    def _update_metrics(self, y: Any, predictions: Any, sample_weight: Any) -> None:
        metrics = compiled_metrics_of(self)
        if metrics is not None:
            metrics.update_state(y, predictions, sample_weight)

    def make_train_function(self, force: bool = False) -> Any:
        """What `fit` calls for each step."""
        check_variables(self)
        take_over_metrics(self)
        if force and self._steps is not None:
            self._steps.forget("train")
        self.train_function = self._function("train")
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """What `evaluate` calls for each step."""
        take_over_metrics(self)
        self.test_function = self._function("test")
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """What `predict` calls for some batches."""
        self._steps = steps = self._steps or self._new_steps()

        def predict(batches: list[Any]) -> Any:
            outputs = [steps.predict(batch) for batch in batches]
            if len(outputs) == 1:
                return outputs[0]
            return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

        self.predict_function = predict
        return predict

    def _new_steps(self) -> StepRunner:
        engine = Engine(
            self.distribute_strategy,
            self.partition,
            self._loss_of,
            self._update_metrics,
            remat=self._parts.remat,
        )
        return StepRunner(self, engine, self.distribute_strategy)

    def _function(self, mode: str) -> Callable[[Iterator[Any]], Any]:
        steps = self._steps
        assert steps is not None

        def run(iterator: Iterator[Any]) -> Any:
            logs = steps.run(mode, iterator)
            for _ in range(self.steps_per_execution - 1):
                try:
                    logs = steps.run(mode, iterator)
                except StopIteration:
                    break
            return logs

        return run

    def reset_metrics(self) -> None:
        """As `keras.Model.reset_metrics`."""
        super().reset_metrics()
        if self._steps is not None:
            self._steps.logs = {}

    def get_metrics_result(self) -> dict[str, Any]:
        """The metrics so far, on all workers; only those with the last stage update them."""
        if tf.executing_eagerly() and self._steps is not None and self._steps.logs:
            return dict(self._steps.logs)
        return super().get_metrics_result()  # type: ignore[no-any-return]
