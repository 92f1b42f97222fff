"""`PipelineModel`, a Keras model that is split into stages and trains with `fit`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.global_view.transfer import Transfer
from tfdist._src.internals.keras import compiled_loss_of, compiled_metrics_of
from tfdist._src.keras.fit.call_checks import check_variables
from tfdist._src.keras.fit.compilation import is_compiled
from tfdist._src.keras.fit.metric_state import take_over_metrics
from tfdist._src.keras.fit.partitioned_step import layouts_of_variables
from tfdist._src.keras.fit.training_data import take_batches_done
from tfdist._src.pipeline.partition import linearize
from tfdist._src.pipeline.placement import model_agreement
from tfdist._src.pipeline.placement.materialize import build, check_free, choose, materialize
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.pipeline.runtime.engine import Engine
from tfdist._src.pipeline.runtime.logs import actions_of, gather_timeline
from tfdist._src.pipeline.runtime.train_step import StepRunner
from tfdist._src.pipeline.simulation import Timeline
from tfdist._src.pipeline.state.full_model import (
    Files,
    FullModelMethods,
    UntrackedFields,
    compile_arguments,
)
from tfdist._src.strategy.extended import extended_of
from tfdist.errors import UnsupportedError


class PipelineModel(FullModelMethods):
    """An ordinary Keras model divided into stages over the workers of a pipeline.

    `compile`, `fit`, `evaluate` and `predict` work as they do on the ordinary model and give the
    same results as a single process. Every worker must create the model and call the same methods.

    Args:
        model: a Sequential or Functional model, or a function that returns one. If `model` is a
            function, its variables get no values until the model is cut, and each worker then
            allocates only the variables of its own stages. So no worker has to hold the full
            model. However, values that the function loads from a file stay in CPU memory until
            the model is cut.
        cuts: the names of the layers after which the model is cut: the last layer of every stage
            except the last stage. If None, stages of about equal cost are chosen.
        balance: the cost to balance among the stages if `cuts` is None: `"time"`, the run time of
            the layers as measured on the chief, or `"parameters"`, an estimate from the layers'
            parameter counts.
        remat: whether each backward pass runs the stage's forward pass again. This saves the
            memory that would otherwise hold the forward pass's intermediate values.

    Raises:
        UnsupportedError: the model is created outside the scope of a pipeline strategy.
        PartitionError: the model cannot be cut into the required number of stages.

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
        balance: str = "time",
        remat: bool = False,
    ) -> None:
        strategy = tf.distribute.get_strategy()
        if not isinstance(strategy, HybridStrategy):
            raise UnsupportedError(
                "A PipelineModel requires a tfdist.PipelineStrategy or tfdist.HybridStrategy. "
                f"Received: {type(strategy).__name__}. Create it inside `with strategy.scope():`."
            )
        full_model, made = build(model)
        check_free(full_model, made, extended_of(strategy).group)
        super().__init__(name=full_model.name, dtype=full_model.dtype_policy)
        model_agreement.agree_on_model(linearize(full_model), extended_of(strategy).group)
        partition = choose(full_model, strategy, cuts, balance)
        mine = [partition.stages[i] for i in strategy.stages_of(strategy.pipeline_rank)]
        materialize(full_model.variables, [v for stage in mine for v in stage.variables], made)
        files = Files(full_model, partition, strategy)
        by_time = cuts is None and balance == "time" and strategy.stages > 1
        self._untracked = UntrackedFields(full_model, partition, remat, files, by_time)
        layers = {id(layer): layer for stage in mine for layer in stage.layers}
        self._own_layers = list(layers.values())
        # A stage may also read variables of layers in other stages: for example, an output layer
        # that reuses the weights of an embedding.
        own = {id(v) for layer in self._own_layers for v in layer.variables}
        read = {id(v): v for stage in mine for v in stage.variables if id(v) not in own}
        self._read_variables = list(read.values())
        if hasattr(full_model, "output_names"):
            self.output_names = full_model.output_names
        self._steps: StepRunner | None = None
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Runs all stages one after another.

        In a pipeline of several workers, only symbolic calls are possible, since no worker holds
        the variables of all stages.

        Raises:
            UnsupportedError: the model is called eagerly in a pipeline of several workers.
        """
        if tf.executing_eagerly() and self.distribute_strategy.pipeline_size > 1:
            raise UnsupportedError(
                "No worker holds all stages of a PipelineModel, so it cannot be called. Use "
                "`predict` or `predict_on_batch` on all workers."
            )
        graph = self.partition.graph
        values: dict[int, Any] = dict(graph.unpack_inputs(inputs))
        for stage in self.partition.stages:
            values.update(stage(values, training=training))
        return graph.pack_outputs(values)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model like `keras.Model.compile`; `run_eagerly` is not supported.

        With `jit_compile=True`, XLA compiles the forward and backward pass of each stage, and the
        optimizer's update. The update is not compiled if several workers of a pipeline hold a copy
        of the same variable.
        """
        if kwargs.get("run_eagerly") is True:
            raise UnsupportedError(
                "run_eagerly=True is not supported in a pipeline, whose passes are operations of "
                "one graph. Omit it."
            )
        model_agreement.agree_on_trainable(self.partition, self.distribute_strategy)
        self._untracked.compiled = compile_arguments(args, kwargs)
        model_agreement.agree_on_compilation(
            self._untracked.compiled, extended_of(self.distribute_strategy).group
        )
        kwargs["jit_compile"] = kwargs.get("jit_compile") is True
        super().compile(*args, **kwargs)
        self._steps = self._new_steps()

    def timeline_on_batch(self, *args: Any, **kwargs: Any) -> Timeline:
        """Trains on a batch like `train_on_batch`, and returns when each action ran.

        An action is the forward or backward pass of one microbatch through one stage.

        All workers must call this method. The first call retraces the step, which distorts the
        times, so use the timeline of the second call. If the workers run on several hosts, the
        hosts' clocks must be synchronized.

        Args:
            *args: arguments of `keras.Model.train_on_batch`.
            **kwargs: keyword arguments of `keras.Model.train_on_batch`.

        Returns:
            The start and end times of all actions in this worker's pipeline. Every worker gets the
            timeline of its own pipeline.

        Example:
            ```python
            from tfdist.pipeline import draw

            for _ in range(2):
                timeline = model.timeline_on_batch(x, y)
            draw(timeline, "timeline.png")
            ```
        """
        if self._steps is None:
            raise ValueError("The model must be compiled before training. Call `compile` first.")
        with self._steps.timing() as last:
            self.train_on_batch(*args, **kwargs)
        return gather_timeline(self.distribute_strategy, last())

    def explain_on_batch(self, batch: Any) -> list[Transfer]:
        """Returns the list of all values that the workers communicate in a training step.

        `strategy.explain` returns the same transfers and also prints them. All workers must call
        this method.

        Args:
            batch: a global batch as for `fit`, such as a pair of inputs and targets.

        Returns:
            The list of transfers that `strategy.explain` returns. Transfers between stages have
            the kind "send".
        """
        if not self.compiled:
            raise ValueError("The model must be compiled before training. Call `compile` first.")
        return self._steps_of_group().explain(batch)

    @contextlib.contextmanager
    def recording_actions(self) -> Iterator[Callable[[], list[tuple[str, float, float]]]]:
        """Records when this worker's actions run, in every training step inside this context.

        All workers must enter this context before the same step, and leave it after the same step.
        In both cases, the workers retrace the next step, which they must do together.

        Yields:
            A function that returns the actions of the last step, each as a tuple
            `(name, start, end)`. The times are in seconds of Unix time.
        """
        if self._steps is None:
            raise ValueError("The model must be compiled before training. Call `compile` first.")
        with self._steps.timing() as last:
            yield lambda: actions_of(self.distribute_strategy, last())

    def _loss_of(self, y: Any, predictions: Any, sample_weight: Any) -> Any:
        loss = compiled_loss_of(self)
        return None if loss is None else loss(y, predictions, sample_weight)

    def _update_metrics(self, y: Any, predictions: Any, sample_weight: Any) -> None:
        metrics = compiled_metrics_of(self)
        if metrics is not None:
            metrics.update_state(y, predictions, sample_weight)

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function that `fit` calls for every `steps_per_execution` batches."""
        check_variables(self)
        take_over_metrics(self)
        if force and self._steps is not None:
            self._steps.forget("train")
        self.train_function = self._function("train")
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Makes the function that `evaluate` calls for every `steps_per_execution` batches."""
        take_over_metrics(self)
        self.test_function = self._function("test")
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """Makes the function that `predict` calls with a list of batches."""

        def predict(batches: list[Any]) -> Any:
            steps = self._steps_of_group()
            outputs = [steps.predict(batch) for batch in batches]
            if len(outputs) == 1:
                return outputs[0]
            return tf.nest.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

        self.predict_function = predict
        return predict

    def _steps_of_group(self) -> StepRunner:
        """Returns the runner of the steps, after replacing it if the group has changed.

        The group changes if workers join or leave the job. All workers must then call this method
        together, since the construction of a runner is collective.
        """
        before, group = self._steps, extended_of(self.distribute_strategy).group
        if before is not None and before.generation == group.generation:
            return before
        self._steps = self._new_steps()
        if before is not None:
            self._steps.logs = before.logs
        return self._steps

    def _new_steps(self) -> StepRunner:
        engine = Engine(
            self.distribute_strategy,
            self.partition,
            self._loss_of,
            self._update_metrics,
            lambda: layouts_of_variables(self, extended_of(self.distribute_strategy)),
            remat=self._untracked.remat,
            jit=is_compiled(self),
        )
        return StepRunner(self, engine, self.distribute_strategy)

    def _function(self, mode: str) -> Callable[[Iterator[Any]], Any]:
        def run(iterator: Iterator[Any]) -> Any:
            steps = self._steps_of_group()
            logs = steps.run(mode, iterator)
            done = take_batches_done() if mode == "train" else 0
            for _ in range(self.steps_per_execution - 1 - done):
                try:
                    logs = steps.run(mode, iterator)
                except StopIteration:
                    break
            return logs

        return run

    def reset_metrics(self) -> None:
        """Resets the metrics and discards the logs of the last step."""
        super().reset_metrics()
        if self._steps is not None:
            self._steps.logs = {}

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the current results of the metrics, on all workers.

        Only the workers that hold the last stage update the compiled metrics. So all workers return
        the logs of the last step, which contain the results, if there is a last step.
        """
        if tf.executing_eagerly() and self._steps is not None and self._steps.logs:
            return dict(self._steps.logs)
        return super().get_metrics_result()  # type: ignore[no-any-return]
