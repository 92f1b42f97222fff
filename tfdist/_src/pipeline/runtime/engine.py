"""Builds a rank's programs for the steps of a model, in agreement with the other ranks."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.global_view.layout import Layout
from tfdist._src.global_view.transfer import Transfer
from tfdist._src.group import Group
from tfdist._src.log import logger
from tfdist._src.pipeline.partition.cut import Partition
from tfdist._src.pipeline.partition.graph import Key
from tfdist._src.pipeline.placement.strategy import HybridStrategy, pipeline_extended_of
from tfdist._src.pipeline.plan.lowering import Send, lower
from tfdist._src.pipeline.runtime.channels import Channel, Pair, open_channels
from tfdist._src.pipeline.runtime.logs import between_stages, gradients
from tfdist._src.pipeline.runtime.microbatch_executor import MicrobatchExecutor
from tfdist._src.pipeline.runtime.outputs import OutputMasks, OutputPrograms
from tfdist._src.pipeline.runtime.shared_variables import SharedVariables
from tfdist._src.pipeline.stages.stage_functions import GradientSums, StageFunctions
from tfdist._src.pipeline.stages.value_specs import ValueSpecs
from tfdist._src.strategy.extended import extended_of
from tfdist._src.xla import compiled_between_collectives
from tfdist.errors import PeerLostError


class Engine:
    """Builds the programs with which a rank runs its stages.

    Args:
        strategy: the strategy, which determines the schedule.
        partition: the model's partition into stages.
        compute_loss: a function that returns the loss, given targets, predictions and sample
            weights.
        update_metrics: a function of the same arguments that updates the metrics.
        layouts_of_variables: a function that returns the layouts of variables over the workers,
            by the `id` of a variable's resource.
        remat: whether each backward pass runs the stage's forward pass again, to save memory.
        jit: whether XLA compiles the passes of the stages and the optimizer's update.

    Attributes:
        jit: whether XLA compiles the passes of the stages and the optimizer's update.
        sums: the sums of the gradients over the microbatches, for this rank's variables.
    """

    def __init__(
        self,
        strategy: HybridStrategy,
        partition: Partition,
        compute_loss: Callable[[Any, Any, Any], Any],
        update_metrics: Callable[[Any, Any, Any], None],
        layouts_of_variables: Callable[[], Mapping[int, Layout]],
        *,
        remat: bool = False,
        jit: bool = False,
    ) -> None:
        self._strategy = strategy
        self._partition = partition
        self._compute_loss = compute_loss
        self._update_metrics = update_metrics
        self._layouts_of_variables = layouts_of_variables
        self._remat = remat
        self.jit = jit
        self.sums = GradientSums(extended_of(strategy).worker_devices[0])
        self._stages: dict[Any, dict[int, StageFunctions]] = {}
        self._outputs: dict[Any, OutputPrograms] = {}
        # The line of code in the loss that needs the outputs of all rows of a batch together, or ""
        # if there is no such line. If there is one, all forward passes must precede all backward
        # passes.
        self._coupling_line = ""
        # `learn` sets these from the reports of all ranks: the transfers of the loss and the
        # metrics, and the paths of the variables with sparse gradients.
        self._of_outputs: list[Transfer] = []
        self._sparse: frozenset[str] = frozenset()
        # The keys of values that depend on trainable variables, but for which the loss has no
        # gradient. No gradients are sent for them.
        self._stopped: frozenset[Key] = frozenset()
        self._channels: dict[Pair, Channel] | None = None
        self._checked: set[str] = set()

    @functools.cached_property
    def value_specs(self) -> ValueSpecs:
        """The specs of the values that pass between stages."""
        return ValueSpecs(self._partition)

    def outputs(self, mode: str, targets: Any) -> OutputPrograms:
        """Returns the programs that compute the loss and the metrics from the model's outputs.

        Only the rank that holds the last stage uses these programs.

        Args:
            mode: `"train"` or `"test"`.
            targets: the specs of the targets and sample weights, as a pair of nested structures.
        """
        key = (mode, repr(targets))
        if key not in self._outputs:
            self._outputs[key] = OutputPrograms(
                self._partition,
                self.value_specs,
                self._masks,
                targets,
                self._compute_loss,
                self._update_metrics,
                self._trained if mode == "train" else frozenset(),
                self._layouts_of_variables,
                jit=self.jit,
            )
        return self._outputs[key]

    @functools.cached_property
    def _masks(self) -> OutputMasks:
        return OutputMasks(self._partition, self.value_specs)

    @functools.cached_property
    def shared_variables(self) -> SharedVariables:
        """The object that keeps the copies of shared variables equal."""
        return SharedVariables(self._partition, self._strategy)

    def compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles the parts of a step outside the stages' passes with XLA, if `jit` is set.

        The most important of these parts is the optimizer's update. There is one exception: several
        ranks of a pipeline may hold copies of the same variable. Each of these ranks updates its
        copy in a different program, and XLA might round the results differently. In that case, the
        function returns the step unchanged, and XLA compiles only the passes.
        """
        if not self.jit or self.shared_variables.has_copies:
            return step
        return compiled_between_collectives(step)

    @property
    def pipeline_rank(self) -> int:
        """This process's pipeline rank."""
        return self._strategy.pipeline_rank

    @property
    def last(self) -> int:
        """The index of the last stage."""
        return len(self._partition.stages) - 1

    @property
    def holds_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self._strategy.pipeline_rank_of(self.last) == self.pipeline_rank

    @functools.cached_property
    def reads(self) -> bool:
        """Whether this rank reads batches from the dataset in training and evaluation."""
        mine = self._strategy.stages_of(self.pipeline_rank)
        if extended_of(self._strategy).group.elastic:
            # In an elastic job, every rank must know the position in the dataset, so every rank
            # reads.
            return True
        return self.holds_last or any(self._partition.model_inputs(stage) for stage in mine)

    def scratch(self) -> list[tf.Variable]:
        """Returns the variables with values that are needed only during a step."""
        return self.sums.variables

    @functools.cached_property
    def training_ranks(self) -> list[int]:
        """The pipeline ranks with trainable variables in their stages, in ascending order."""
        stages = [stage for stage in self._partition.stages if stage.trainable_variables]
        return sorted({self._strategy.pipeline_rank_of(stage.index) for stage in stages})

    def stage_of(self, variable: Any) -> int | None:
        """Returns the index of this rank's stage that trains a `tf.Variable`, or None."""
        return self._stage_of.get(id(variable))

    @functools.cached_property
    def _stage_of(self) -> dict[int, int]:
        return {
            id(variable.value): index
            for index in self._strategy.stages_of(self.pipeline_rank)
            for variable in self._partition.stages[index].trainable_variables
        }

    @property
    def output_specs(self) -> list[tf.TensorSpec]:
        """The specs of the model's outputs, as a flat list."""
        return [self.value_specs.of(key).spec for key in self._partition.graph.outputs]

    def inputs(self, x: Any) -> dict[Key, Any]:
        """Flattens the inputs that a user passes to the model, and returns them by key."""
        return self._partition.graph.unpack_inputs(x)

    def check_inputs(self, x: Any) -> None:
        """Checks the shapes of the inputs that a user passes to the model.

        Raises:
            ValueError: an input has the wrong shape.
        """
        shapes = repr(keras.tree.map_structure(lambda t: t.shape[1:], x))
        if shapes in self._checked:
            return
        graph = self._partition.graph
        for tensor, (key, given) in zip(graph.model.inputs, self.inputs(x).items(), strict=True):
            known = graph.specs[key].shape
            if any(a not in (None, b) for a, b in zip(known, given.shape, strict=True)):
                raise ValueError(
                    f"The model's input {tensor.name!r} has the shape {known}. Received: a batch "
                    f"of shape {tuple(given.shape)}. Pass batches of the shape the model expects."
                )
        self._checked.add(shapes)

    def pack_outputs(self, outputs: Sequence[Any]) -> Any:
        """Packs a flat list of outputs into the structure of the model's outputs."""
        graph = self._partition.graph
        return graph.pack_outputs(dict(zip(graph.outputs, outputs, strict=True)))

    def program(
        self, mode: str, microbatches: int, targets: Any = None, *, timed: bool = False
    ) -> MicrobatchExecutor:
        """Returns the program of a step, and traces this rank's stages if necessary.

        Args:
            mode: `"train"`, `"test"` or `"predict"`.
            microbatches: the number of microbatches.
            targets: the specs of the targets and sample weights, as a pair of nested structures.
            timed: whether to record when each action runs.
        """
        schedule = self._strategy.schedule_for(microbatches)
        if mode != "train":
            schedule = schedule.forward_only()
        elif self._coupling_line:
            schedule = schedule.forward_first()
        edges = [(e.source, e.target) for e in self._partition.edges]
        back = self._with_gradient(mode)
        backward = [(e.source, e.target) for e in self._partition.edges if set(e.keys) & back]
        steps = lower(schedule, edges, backward)
        if self._channels is None:
            _ = self.shared_variables
            self._channels = self._open_channels(edges)
        return MicrobatchExecutor(
            self.pipeline_rank,
            steps[self.pipeline_rank],
            self._stages_for(mode, targets, split=schedule.splits_backward),
            self._partition,
            self.value_specs,
            back,
            self._channels,
            timed=timed,
        )

    def findings(self, program: MicrobatchExecutor, rows: int) -> dict[str, Any]:
        """Returns a report on this rank's program, which `learn` needs on all ranks.

        The report describes the gradients of this rank's variables and values, and the loss.

        Args:
            program: the program.
            rows: the number of rows of the batch.
        """
        stages = program.stages.values()
        replicas = pipeline_extended_of(self._strategy).mesh.pipeline_count
        trained = [p for (mode, _), p in self._outputs.items() if mode == "train"]
        last = [trained[-1].loss, trained[-1].metrics] if trained and replicas > 1 else []
        communicated = [one for p in last if p for one in p.transfers(rows, replicas)]
        return {
            "communicated": [dataclasses.astuple(one) for one in communicated],
            "sparse": [variable.path for stage in stages for variable in stage.sparse_variables],
            "coupling_line": self._found_coupling_line(),
            "stopped": [(s.stage.index, key) for s in stages for key in s.without_gradient],
            "gradient_kinds": self.shared_variables.gradient_kinds(stages),
        }

    def learn(self, findings: Sequence[dict[str, Any]]) -> bool:
        """Records the reports of all ranks.

        Args:
            findings: for each rank of the job, the result of `findings`.

        Returns:
            Whether the ranks must build their programs again because of the reports.
        """
        self._sparse |= {path for found in findings for path in found["sparse"]}
        # The ranks that hold the last stage report the same transfers in all pipelines.
        for found in findings:
            if found["communicated"]:
                self._of_outputs = [_transfer_of(values) for values in found["communicated"]]
        self.shared_variables.learn([found["gradient_kinds"] for found in findings])
        coupling_line = next(
            (found["coupling_line"] for found in findings if found["coupling_line"]), ""
        )
        reorders = bool(coupling_line) and not self._coupling_line
        self._coupling_line = self._coupling_line or coupling_line
        if reorders and extended_of(self._strategy).group.topology.is_chief:
            logger.warning(
                f"The loss ({coupling_line}) needs the outputs of all microbatches at once. So "
                "all forward passes precede the backward passes: workers keep the activations of "
                "all microbatches."
            )
        stopped = {tuple(pair) for found in findings for pair in found["stopped"]}
        consumers: dict[Key, set[int]] = {}
        for edge in self._partition.edges:
            for key in edge.keys:
                consumers.setdefault(key, set()).add(edge.target)
        new = {key for _, key in stopped if {(t, key) for t in consumers[key]} <= stopped}
        if not new:
            return reorders
        self._stopped |= new
        self._stages.clear()
        return True

    def transfers(self, rows: int) -> list[Transfer]:
        """Returns the transfers of a training step.

        The result is complete only after `agree_on_program` has built a training program.

        Args:
            rows: the number of rows of the batch.
        """
        back = self._with_gradient("train")
        sent = between_stages(self._partition, self.value_specs, self._strategy, back, rows)
        return [*sent, *gradients(self._partition, self._strategy, self._sparse), *self._of_outputs]

    def _open_channels(self, edges: list[tuple[int, int]]) -> dict[Pair, Channel]:
        extended = pipeline_extended_of(self._strategy)
        schedule = self._strategy.schedule_for(self._strategy.microbatches)
        pairs = {
            (rank, step.peer)
            for rank, steps in enumerate(lower(schedule, edges))
            for step in steps
            if isinstance(step, Send)
        }
        group = extended.group
        open_part = functools.partial(group.native_part, gpus=extended.gpus)
        return open_channels(pairs, group.topology.rank, extended.mesh.pipelines, open_part)

    def _stages_for(self, mode: str, targets: Any, *, split: bool) -> dict[int, StageFunctions]:
        key = (mode, split, repr(targets))
        if key not in self._stages:
            mine = self._strategy.stages_of(self.pipeline_rank)
            self._stages[key] = {
                index: StageFunctions(
                    self._partition,
                    index,
                    self.value_specs,
                    self._with_gradient(mode),
                    self._partition.stages[index].trainable_variables if mode == "train" else [],
                    self.sums,
                    self._layouts_of_variables,
                    training=mode == "train",
                    has_loss=mode != "predict",
                    differentiable_outputs=(
                        self._differentiable_outputs(mode, targets) if index == self.last else None
                    ),
                    split=split,
                    remat=self._remat,
                    jit=self.jit,
                )
                for index in mine
            }
        return self._stages[key]

    def _differentiable_outputs(self, mode: str, targets: Any) -> list[Key]:
        """Returns the keys of the model's outputs for which the loss has gradients."""
        if mode != "train":
            return []
        return self.outputs(mode, targets).gradients

    def _found_coupling_line(self) -> str:
        """Returns the line of code in the loss that needs the outputs of all rows, or ""."""
        losses = [p.loss for (mode, _), p in self._outputs.items() if mode == "train"]
        return next(
            (loss.coupling_line for loss in losses if loss is not None and loss.coupling_line), ""
        )

    def _with_gradient(self, mode: str) -> frozenset[Key]:
        return self._differentiable - self._stopped if mode == "train" else frozenset()

    @functools.cached_property
    def _differentiable(self) -> frozenset[Key]:
        """The keys of the values that pass between stages and depend on trainable variables."""
        between = {key for edge in self._partition.edges for key in edge.differentiable}
        return self._trained & between

    @functools.cached_property
    def _trained(self) -> frozenset[Key]:
        """The keys of the floating-point values that depend on trainable variables."""
        found: set[Key] = set()
        for stage in self._partition.stages:
            for call in stage.calls:
                trained = any(v.trainable for v in call.variables)
                if trained or found & set(call.inputs):
                    found.update(call.outputs)
        specs = self._partition.graph.specs
        return frozenset(key for key in found if specs[key].is_floating)


def _transfer_of(values: Sequence[Any]) -> Transfer:
    """Makes a transfer from the list of its attributes that was decoded from JSON."""
    kind, operation, size, shape, *rest = values
    return Transfer(kind, operation, size, tuple(shape), *rest)


def agree_on_program(
    engine: Engine, group: Group, rows: int, *args: Any, **kwargs: Any
) -> MicrobatchExecutor:
    """Builds this rank's program of a step; all ranks of the job must call it together.

    The ranks exchange reports on their programs, and build them again if the reports require it.

    Args:
        engine: this rank's engine.
        group: the group of all ranks.
        rows: the number of rows of the batch.
        *args: the positional arguments of `Engine.program`.
        **kwargs: the keyword arguments of `Engine.program`.

    Raises:
        PeerLostError: another rank could not build its program.
    """
    while True:
        programs: list[MicrobatchExecutor] = []

        def build(programs: list[MicrobatchExecutor] = programs) -> dict[str, Any]:
            programs.append(engine.program(*args, **kwargs))
            return engine.findings(programs[0], rows)

        if not engine.learn(_share(group, "pipeline", build)):
            return programs[0]


def agree_on_update(group: Group, trace: Callable[[], bool]) -> bool:
    """Returns whether all ranks can defer the update to the end of the step.

    All ranks of the job must call this function together.

    Args:
        group: the group of all ranks.
        trace: a function that traces the step on this rank, and returns whether this rank can
            defer its update.

    Raises:
        PeerLostError: another rank could not trace its step.
    """
    return all(report["late"] for report in _share(group, "update", lambda: {"late": trace()}))


def _share(group: Group, topic: str, build: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls `build` on each rank, and shares the reports that it returns.

    Args:
        group: the group of all ranks, which must call this function together.
        topic: the name of the exchange.
        build: a function that returns this rank's report.

    Returns:
        The reports of all ranks.

    Raises:
        PeerLostError: `build` has failed on another rank. If it fails on this rank, its own error
            is raised.
    """
    error = None
    try:
        report = build()
    except Exception as problem:
        # Send the error before raising it, since the other ranks wait for this rank's report.
        error, report = problem, {"error": f"{problem}"}
    reports = [json.loads(text) for text in group.exchange(topic, json.dumps(report))]
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if "error" in report:
            raise PeerLostError(
                f"{group.topology.workers[rank]} could not build its stages: {report['error']}"
            )
    return reports
