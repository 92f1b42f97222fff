"""What the passes of a pipeline and its transfers take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfdist.pipeline.plan.action import Kind


@dataclass(frozen=True)
class Costs:
    """The seconds that each pass of a microbatch takes, and each transfer.

    One number stands for the share of the model that a rank holds: of a rank with two stages each
    takes half of it, so the same costs compare schedules with and without virtual stages. A
    sequence gives the seconds of each stage itself.

    Attributes:
        forward: of a forward pass.
        input_gradient: of the first part of a backward pass.
        weight_gradient: of its second part.
        backward: of a whole backward pass; by default that of both parts.
        transfer: between the moment when both ranks are ready for a message and its arrival.

    Example:
        >>> Costs(1.0, 1.0, 1.0).seconds(ranks=2, stages=4)[Kind.BACKWARD]
        (1.0, 1.0, 1.0, 1.0)
    """

    forward: float | Sequence[float] = 1.0
    input_gradient: float | Sequence[float] = 1.0
    weight_gradient: float | Sequence[float] = 1.0
    backward: float | Sequence[float] | None = None
    transfer: float = 0.0

    def seconds(self, ranks: int, stages: int) -> dict[Kind, tuple[float, ...]]:
        """The seconds of each kind of pass, for each stage.

        Args:
            ranks: the processes of the pipeline.
            stages: the stages of all of them together.

        Returns:
            For each kind, a number for each stage.

        Raises:
            ValueError: a sequence has another length, or a number is negative.
        """

        def each(name: str, cost: float | Sequence[float]) -> tuple[float, ...]:
            if isinstance(cost, Iterable):
                values = tuple(float(value) for value in cost)
            else:
                values = (float(cost) * ranks / stages,) * stages
            if len(values) != stages or not all(value >= 0 for value in values):
                raise ValueError(
                    f"`{name}` is one number that is not negative, or {stages} of them, one for "
                    f"each stage. Received: {cost}."
                )
            return values

        if not self.transfer >= 0:
            raise ValueError(f"`transfer` is not negative. Received: {self.transfer}.")
        inputs = each("input_gradient", self.input_gradient)
        weights = each("weight_gradient", self.weight_gradient)
        whole = tuple(i + w for i, w in zip(inputs, weights, strict=True))
        return {
            Kind.FORWARD: each("forward", self.forward),
            Kind.BACKWARD: whole if self.backward is None else each("backward", self.backward),
            Kind.INPUT_GRADIENT: inputs,
            Kind.WEIGHT_GRADIENT: weights,
        }
