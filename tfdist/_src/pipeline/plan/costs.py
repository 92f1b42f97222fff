"""The costs of a pipeline's passes and transfers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfdist._src.pipeline.plan.action import Kind


@dataclass(frozen=True)
class Costs:
    """The duration in seconds of each pass of a microbatch, and of each transfer.

    A single number covers all stages of a rank: with two stages per rank, each costs half of it,
    so the same costs compare schedules with and without virtual stages. A sequence lists the
    seconds of each stage.

    Attributes:
        forward: of a forward pass.
        input_gradient: of the first part of a backward pass.
        weight_gradient: of its second part.
        backward: of a whole backward pass; by default, the sum of both parts.
        transfer: from the moment both ranks are ready for a message to its arrival.

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
        """The seconds of each kind of pass, per stage.

        Args:
            ranks: the number of ranks in the pipeline.
            stages: the number of stages on all ranks together.

        Returns:
            For each kind, one number per stage.

        Raises:
            ValueError: a sequence has the wrong length, or a number is negative.
        """

        def each(name: str, cost: float | Sequence[float]) -> tuple[float, ...]:
            if isinstance(cost, Iterable):
                values = tuple(float(value) for value in cost)
            else:
                values = (float(cost) * ranks / stages,) * stages
            if len(values) != stages or not all(value >= 0 for value in values):
                raise ValueError(
                    f"`{name}` must be a number >= 0, or {stages} of them, one for each stage. "
                    f"Received: {cost}."
                )
            return values

        if not self.transfer >= 0:
            raise ValueError(f"`transfer` must be >= 0. Received: {self.transfer}.")
        inputs = each("input_gradient", self.input_gradient)
        weights = each("weight_gradient", self.weight_gradient)
        whole = tuple(i + w for i, w in zip(inputs, weights, strict=True))
        return {
            Kind.FORWARD: each("forward", self.forward),
            Kind.BACKWARD: whole if self.backward is None else each("backward", self.backward),
            Kind.INPUT_GRADIENT: inputs,
            Kind.WEIGHT_GRADIENT: weights,
        }
