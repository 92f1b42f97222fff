"""Adds a rank's actions, sends and receives to one graph, which then runs as a step."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfdist._src.pipeline.partition import Edge, Partition, pack, unpack
from tfdist._src.pipeline.plan.lowering import Receive, Send, Step
from tfdist._src.pipeline.plan.schedule import Action, Kind
from tfdist._src.pipeline.runtime.channels import Channel, Pair
from tfdist._src.pipeline.runtime.outputs import Outputs
from tfdist._src.pipeline.stages.stage_functions import ForwardResult, StageFunctions, Tensors
from tfdist._src.pipeline.stages.value_specs import ValueSpecs


@dataclass(frozen=True)
class Feed:
    """The inputs of a step.

    `rows`, `inputs` and `position` are functions of the index of a microbatch.

    Attributes:
        rows: returns the number of rows of the microbatch.
        inputs: returns the model's inputs for the microbatch, by key.
        position: returns the number of rows of the microbatch, the number of rows of the batch,
            and the index of the microbatch's first row in the batch.
        seed: the loss scale. The backward pass starts with this gradient for the losses that the
            layers of a stage add.
        outputs: an object that collects the model's outputs on the rank that holds the last stage;
            None on other ranks.
    """

    rows: Callable[[int], tf.Tensor]
    inputs: Callable[[int], Tensors]
    position: Callable[[int], Sequence[tf.Tensor]]
    seed: tf.Tensor
    outputs: Outputs | None = None


# An action, and tensors with its start and end time in seconds.
Times = tuple[Action, tf.Tensor, tf.Tensor]


@dataclass
class Outcome:
    """The results of a step on a rank.

    Attributes:
        losses: this rank's contributions to the loss of the batch. On the rank that holds the last
            stage, they include the loss passed to `compile`.
        times: the start and end of each action; empty if the times are not recorded.
        last: tensors that become available when all actions have run. Other operations can wait
            for them.
        sends: the send operations.
    """

    losses: list[tf.Tensor] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    last: list[tf.Tensor] = field(default_factory=list)
    sends: list[tf.Operation] = field(default_factory=list)

    @property
    def spans(self) -> tf.Tensor:
        """A tensor with one row for each recorded action, and columns for its start and end."""
        spans = [tf.stack([start, end]) for _, start, end in self.times]
        return tf.stack(spans) if spans else tf.zeros([0, 2], tf.float64)


class MicrobatchExecutor:
    """Executes a rank's part of a schedule.

    Args:
        rank: this process's pipeline rank.
        steps: the steps that `plan.lowering.lower` returns for this rank.
        stages: the functions of this rank's stages, by the index of the stage.
        partition: the model's partition into stages.
        value_specs: the specs of the values that pass between stages.
        differentiable: the keys of the values for which gradients are sent back.
        channels: this rank's channels, by pairs `(sender, receiver)` of pipeline ranks.
        timed: whether to record when each action runs.
    """

    def __init__(
        self,
        rank: int,
        steps: Sequence[Step],
        stages: Mapping[int, StageFunctions],
        partition: Partition,
        value_specs: ValueSpecs,
        differentiable: frozenset[int],
        channels: Mapping[Pair, Channel],
        *,
        timed: bool = False,
    ) -> None:
        self.rank = rank
        self.steps = steps
        self.stages = stages
        self.partition = partition
        self.edges = {(edge.source, edge.target): edge for edge in partition.edges}
        self.value_specs = value_specs
        self.differentiable = differentiable
        self.channels = channels
        self.timed = timed

    def run(self, feed: Feed) -> Outcome:
        """Adds the operations of one step to the graph that is being traced."""
        run = _Run(self, feed)
        for step in self.steps:
            run.add(step)
        run.finish()
        return run.outcome

    def edges_into(self, stage: int) -> list[Edge]:
        """Returns the edges over which a stage receives values."""
        return [edge for edge in self.edges.values() if edge.target == stage]

    def gradients_of(self, edge: Edge) -> list[int]:
        """Returns the keys of the values for which gradients are sent back over an edge."""
        return [key for key in edge.keys if key in self.differentiable]


class _Run:
    """Adds the operations of one step to the graph, and keeps the tensors that later steps need."""

    def __init__(self, program: MicrobatchExecutor, feed: Feed) -> None:
        self.outcome = Outcome()
        self._program = program
        self._feed = feed
        forward = [s for s in program.steps if isinstance(s, Action) and s.kind is Kind.FORWARD]
        self._last_forward = {action.stage: action for action in forward}
        # The next action or receive waits for `last`, and the next send waits for `_ready`.
        self.last: list[tf.Tensor] = []
        self._ready: list[tf.Tensor] = []
        # Tensors received from other ranks, by the stages of the edge and the microbatch.
        self._received_values: dict[tuple[int, int, int], Tensors] = {}
        self._received_gradients: dict[tuple[int, int, int], Tensors] = {}
        # The results of the passes on this rank, by stage and microbatch.
        self._forward_results: dict[tuple[int, int], ForwardResult] = {}
        self._input_gradients: dict[tuple[int, int], Tensors] = {}
        self._saved: dict[tuple[int, int], dict[str, tf.Tensor]] = {}

    def add(self, step: Step) -> None:
        # A send starts as soon as its tensors are available. A receive waits for the preceding
        # action, since it would otherwise allocate the memory for its tensors too early.
        with tf.control_dependencies(self._ready if isinstance(step, Send) else self.last):
            if isinstance(step, Send):
                self._send(step)
            elif isinstance(step, Receive):
                self._receive(step)
            else:
                self._compute(step)

    def finish(self) -> None:
        """Adds the operations that run after all actions."""
        if self._feed.outputs is not None:
            with tf.control_dependencies(self.last):
                self._feed.outputs.finish()
            self.outcome.losses += self._feed.outputs.losses
        self.outcome.last = self.last

    def _ends_with(self, action: Action) -> bool:
        """Whether an action belongs to the last stage of the model."""
        return action.stage == len(self._program.partition.stages) - 1

    def _compute(self, action: Action) -> None:
        self._ready = []
        if action.kind is Kind.FORWARD:
            self._forward(action)
        elif action.kind is Kind.WEIGHT_GRADIENT:
            with self._timing(action, []):
                self._add_gradients(action)
        else:
            self._backward(action)
        self._ready = self._ready or self.last

    def _forward(self, action: Action) -> None:
        stage, microbatch = self._program.stages[action.stage], action.microbatch
        values = dict(self._feed.inputs(microbatch))
        for edge in self._program.edges_into(action.stage):
            if edge.source in self._program.stages:
                result = self._forward_results[edge.source, microbatch]
                values |= {key: result.values[key] for key in edge.keys}
            else:
                values |= self._received_values.pop((edge.source, edge.target, microbatch))
        is_last = action == self._last_forward[action.stage]
        position = [*self._feed.position(microbatch), tf.constant(is_last)]
        with self._timing(action, [*values.values(), *position]):
            result = stage.forward(values, position)
            self.last = stage.done
            if self._ends_with(action):
                assert self._feed.outputs is not None
                self.last = [*self.last, *self._feed.outputs.add(microbatch, result.values)]
        self._forward_results[action.stage, microbatch] = result
        if result.loss is not None:
            self.outcome.losses.append(result.loss)

    def _backward(self, action: Action) -> None:
        stage, microbatch = self._program.stages[action.stage], action.microbatch
        parts: dict[int, list[tf.Tensor]] = {key: [] for key in stage.outputs_with_gradient}
        for edge in self._program.edges.values():
            if edge.source != action.stage or not self._program.gradients_of(edge):
                continue
            if edge.target in self._program.stages:
                gradients = self._input_gradients[edge.target, microbatch]
            else:
                gradients = self._received_gradients.pop((edge.source, edge.target, microbatch))
            for key in self._program.gradients_of(edge):
                parts[key].append(gradients[key])
        if self._ends_with(action):
            assert self._feed.outputs is not None
            with tf.control_dependencies(self.last):
                for key, gradient in self._feed.outputs.gradients(microbatch).items():
                    parts[key].append(gradient)
        sums = {key: tf.add_n(tensors) for key, tensors in parts.items()}
        result = self._forward_results.pop((action.stage, microbatch))
        with self._timing(action, list(sums.values())):
            given, kept = stage.backward(result.kept, sums, self._feed.seed)
            self.last = stage.done or self.last
            self._input_gradients[action.stage, microbatch] = given
            self._saved[action.stage, microbatch] = kept
            if action.kind is Kind.BACKWARD:
                if stage.split:  # The next send need not wait for the second part.
                    self._ready = self.last
                with tf.control_dependencies(self.last):
                    self._add_gradients(action)

    def _add_gradients(self, action: Action) -> None:
        stage = self._program.stages[action.stage]
        stage.add_gradients(self._saved.pop((action.stage, action.microbatch)))
        self.last = stage.done or self.last

    @contextlib.contextmanager
    def _timing(self, action: Action, inputs: Sequence[tf.Tensor]) -> Iterator[None]:
        """Records the time of the operations that are added in this context, if times are recorded.

        The time starts when all inputs are available.
        """
        if not self._program.timed:
            yield
            return
        with tf.control_dependencies(inputs):
            start = tf.timestamp()
        with tf.control_dependencies([start]):
            yield
        with tf.control_dependencies([start, *self.last]):
            end = tf.timestamp()
        self.last = [end]  # The next action starts after the end time has been recorded.
        self.outcome.times.append((action, start, end))

    def _send(self, step: Send) -> None:
        if step.value_kind == "activation":
            edge = self._program.edges[step.source, step.target]
            values = self._forward_results[step.source, step.microbatch].values
            tensors = pack(self._program.partition, edge, values)
        else:
            edge = self._program.edges[step.target, step.source]
            given = self._input_gradients[step.source, step.microbatch]
            tensors = [given[key] for key in self._program.gradients_of(edge)]
        channel = self._program.channels[self._program.rank, step.peer]
        self.outcome.sends += channel.send(tensors, _name(step))

    def _receive(self, step: Receive) -> None:
        program = self._program
        channel = program.channels[step.peer, program.rank]
        rows = self._feed.rows(step.microbatch)
        if step.value_kind == "activation":
            edge = program.edges[step.source, step.target]
            received = channel.receive(program.value_specs.of_edge(edge), rows, _name(step))
            self._received_values[step.source, step.target, step.microbatch] = unpack(
                edge, received
            )
        else:
            edge = program.edges[step.target, step.source]
            keys = program.gradients_of(edge)
            received = channel.receive(
                [program.value_specs.of(key) for key in keys], rows, _name(step)
            )
            key = (step.target, step.source, step.microbatch)
            self._received_gradients[key] = dict(zip(keys, received, strict=True))


def _name(step: Send | Receive) -> str:
    return f"{step.value_kind} {step.source}>{step.target}.{step.microbatch}"
