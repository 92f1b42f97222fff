"""How neighbours share out gradients: each carries some of them on, for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.compression.gradient import Gradient


@dataclasses.dataclass(frozen=True)
class HostLeaders:
    """Neighbours whose links are fast: the devices of a worker, or the workers of a host.

    They sum their gradients exactly. Each carries some of the sums to where neighbours like them
    are, and gives the others what comes of it.

    Attributes:
        group: their communicator; None for one without neighbours.
        lanes: how many of them carry gradients.
        lane: which of those this one is; from `lanes` on, it carries none.
        stride: consecutive gradients that go together.
    """

    group: NativeCommunicator | None = None
    lanes: int = 1
    lane: int = 0
    stride: int = 1

    def lane_of(self, number: int) -> int:
        """Which of them carries the gradient of a number."""
        return number // self.stride % self.lanes

    def carries(self, number: int) -> bool:
        """Whether this one does."""
        return self.lane_of(number) == self.lane

    def sum(
        self,
        gradients: Sequence[Gradient],
        sum_farther: Callable[[list[Gradient]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Sums gradients over the neighbours, and farther.

        Args:
            gradients: of the same shapes and numbers everywhere.
            sum_farther: what to do with the neighbours' sums that this one carries.

        Returns:
            The sums, bitwise equal at all neighbours.
        """
        if self.group is None:
            return sum_farther(list(gradients))
        sums = self.group.all_reduce([g.value for g in gradients])
        mine = [i for i, g in enumerate(gradients) if self.carries(g.number)]
        if mine:
            carried = [dataclasses.replace(gradients[i], value=sums[i]) for i in mine]
            for i, total in zip(mine, sum_farther(carried), strict=True):
                sums[i] = total
        return [
            self.group.broadcast(total, root=self.lane_of(g.number))
            for g, total in zip(gradients, sums, strict=True)
        ]
