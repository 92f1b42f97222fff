"""Runs a rank's list of actions, sends and receives as operations of one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfdist.pipeline.partition import Edge, Partition, pack, unpack
from tfdist.pipeline.plan.action import Action, Kind
from tfdist.pipeline.plan.lowering import Receive, Send, Step
from tfdist.pipeline.runtime.channels import Channel, Pair
from tfdist.pipeline.stages.stage_functions import Ran, StageFunctions, Tensors
from tfdist.pipeline.stages.value_specs import ValueSpecs


@dataclass(frozen=True)
class Feed:
    """What a step is fed, by microbatch.

    Attributes:
        rows: the number of rows.
        inputs: the model's inputs, by key.
        extra: what a stage's end is given, by stage and microbatch.
        seed: the gradient of what stages add to the loss.
    """

    rows: Callable[[int], tf.Tensor]
    inputs: Callable[[int], Tensors]
    extra: Callable[[int, int], Sequence[tf.Tensor]]
    seed: Callable[[int], tf.Tensor]


# An action, and when it began and ended in seconds of the clock, as tensors.
Times = tuple[Action, tf.Tensor, tf.Tensor]


@dataclass
class Outcome:
    """What a rank has after a step.

    Attributes:
        losses: by microbatch, what the rank's stages add to the loss.
        results: by stage and microbatch, what its end returned.
        times: where they are wanted, each action's start and end.
    """

    losses: dict[int, list[tf.Tensor]] = field(default_factory=dict)
    results: dict[tuple[int, int], list[tf.Tensor]] = field(default_factory=dict)
    times: list[Times] = field(default_factory=list)


class MicrobatchExecutor:
    """A rank's part of a schedule.

    Args:
        rank: in the pipeline.
        steps: of this rank, as `tfdist.pipeline.plan.lowering.lower` gives them.
        stages: this rank's, by number.
        partition: of the model.
        wires: the forms of the values between stages.
        differentiable: the values that have a gradient.
        channels: this rank's, by the ranks in the pipeline that send and receive.
        timed: whether to note when each action runs.
    """

    def __init__(
        self,
        rank: int,
        steps: Sequence[Step],
        stages: Mapping[int, StageFunctions],
        partition: Partition,
        wires: ValueSpecs,
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
        self.wires = wires
        self.differentiable = differentiable
        self.channels = channels
        self.timed = timed

    def run(self, feed: Feed) -> Outcome:
        """Adds one step to the graph that is being traced."""
        run = _Run(self, feed)
        for step in self.steps:
            run.take(step)
        return run.outcome

    def into(self, stage: int) -> list[Edge]:
        """The edges to a stage."""
        return [edge for edge in self.edges.values() if edge.target == stage]

    def gradients_of(self, edge: Edge) -> list[int]:
        """The values of an edge whose gradients go back over it."""
        return [key for key in edge.keys if key in self.differentiable]


class _Run:
    """One step's tensors while its operations are made."""

    def __init__(self, program: MicrobatchExecutor, feed: Feed) -> None:
        self.outcome = Outcome()
        self._program = program
        self._feed = feed
        # To wait for: of the last action all, and all that it sends.
        self._last: list[tf.Tensor] = []
        self._made: list[tf.Tensor] = []
        # What has come from other ranks, by edge and microbatch: values, gradients.
        self._received: dict[tuple[int, int, int], Tensors] = {}
        self._returned: dict[tuple[int, int, int], Tensors] = {}
        # By stage and microbatch: of the passes that were run here.
        self._ran: dict[tuple[int, int], Ran] = {}
        self._given: dict[tuple[int, int], Tensors] = {}
        self._kept: dict[tuple[int, int], dict[str, tf.Tensor]] = {}

    def take(self, step: Step) -> None:
        # What goes leaves as soon as it exists; what comes waits for the computation before it,
        # lest its memory is held too early.
        with tf.control_dependencies(self._made if isinstance(step, Send) else self._last):
            if isinstance(step, Send):
                self._send(step)
            elif isinstance(step, Receive):
                self._receive(step)
            else:
                self._compute(step)

    def _compute(self, action: Action) -> None:
        self._made = []
        if action.kind is Kind.FORWARD:
            self._forward(action)
        elif action.kind is Kind.WEIGHT_GRADIENT:
            with self._timing(action, []):
                self._add_gradients(action)
        else:
            self._backward(action)
        self._made = self._made or self._last

    def _forward(self, action: Action) -> None:
        stage, microbatch = self._program.stages[action.stage], action.microbatch
        values = dict(self._feed.inputs(microbatch))
        for edge in self._program.into(action.stage):
            if edge.source in self._program.stages:
                ran = self._ran[edge.source, microbatch]
                values |= {key: ran.values[key] for key in edge.keys}
            else:
                values |= self._received.pop((edge.source, edge.target, microbatch))
        extra = self._feed.extra(action.stage, microbatch)
        with self._timing(action, [*values.values(), *extra]):
            ran = stage.forward(values, extra)
            self._last = stage.done
        self._ran[action.stage, microbatch] = ran
        self.outcome.results[action.stage, microbatch] = ran.results
        if ran.loss is not None:
            self.outcome.losses.setdefault(microbatch, []).append(ran.loss)

    def _backward(self, action: Action) -> None:
        stage, microbatch = self._program.stages[action.stage], action.microbatch
        parts: dict[int, list[tf.Tensor]] = {key: [] for key in stage.takes_gradients}
        for edge in self._program.edges.values():
            if edge.source != action.stage or not self._program.gradients_of(edge):
                continue
            if edge.target in self._program.stages:
                gradients = self._given[edge.target, microbatch]
            else:
                gradients = self._returned.pop((edge.source, edge.target, microbatch))
            for key in self._program.gradients_of(edge):
                parts[key].append(gradients[key])
        sums = {key: tf.add_n(tensors) for key, tensors in parts.items()}
        ran = self._ran.pop((action.stage, microbatch))
        with self._timing(action, list(sums.values())):
            given, kept = stage.backward(ran.kept, sums, self._feed.seed(microbatch))
            self._last = stage.done or self._last
            self._given[action.stage, microbatch] = given
            self._kept[action.stage, microbatch] = kept
            if action.kind is Kind.BACKWARD:
                if stage.split:  # Others wait for the first part alone.
                    self._made = self._last
                with tf.control_dependencies(self._last):
                    self._add_gradients(action)

    def _add_gradients(self, action: Action) -> None:
        stage = self._program.stages[action.stage]
        stage.add_gradients(self._kept.pop((action.stage, action.microbatch)))
        self._last = stage.done or self._last

    @contextlib.contextmanager
    def _timing(self, action: Action, inputs: Sequence[tf.Tensor]) -> Iterator[None]:
        """What is added while it lasts is the action, which begins when its inputs have come."""
        if not self._program.timed:
            yield
            return
        with tf.control_dependencies(inputs):
            start = tf.timestamp()
        with tf.control_dependencies([start]):
            yield
        with tf.control_dependencies([start, *self._last]):
            end = tf.timestamp()
        self._last = [end]  # What follows comes later.
        self.outcome.times.append((action, start, end))

    def _send(self, step: Send) -> None:
        if step.what == "activation":
            edge = self._program.edges[step.source, step.target]
            values = self._ran[step.source, step.microbatch].values
            tensors = pack(self._program.partition, edge, values)
        else:
            edge = self._program.edges[step.target, step.source]
            given = self._given[step.source, step.microbatch]
            tensors = [given[key] for key in self._program.gradients_of(edge)]
        self._program.channels[self._program.rank, step.peer].send(tensors, _name(step))

    def _receive(self, step: Receive) -> None:
        program = self._program
        channel = program.channels[step.peer, program.rank]
        rows = self._feed.rows(step.microbatch)
        if step.what == "activation":
            edge = program.edges[step.source, step.target]
            got = channel.receive(program.wires.of_edge(edge), rows, _name(step))
            self._received[step.source, step.target, step.microbatch] = unpack(edge, got)
        else:
            edge = program.edges[step.target, step.source]
            keys = program.gradients_of(edge)
            got = channel.receive([program.wires.of(key) for key in keys], rows, _name(step))
            place = (step.target, step.source, step.microbatch)
            self._returned[place] = dict(zip(keys, got, strict=True))


def _name(step: Send | Receive) -> str:
    return f"{step.what} {step.source}>{step.target}.{step.microbatch}"
