"""Divides gradients among neighbors: each leads the exchange of some of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.compression.gradient import Gradient


@dataclasses.dataclass(frozen=True)
class HostLeaders:
    """Neighbors with fast links: the devices of a worker, or the workers of a host.

    They sum their gradients exactly. Each leader exchanges some of the sums with its counterparts
    among other neighbors, and broadcasts the results to its own.

    Attributes:
        group: the neighbors' communicator; None for one without neighbors.
        num_leaders: the number of neighbors that lead gradients.
        index: this neighbor's index; from `num_leaders` on, it leads none.
        stride: the number of consecutive gradients with the same leader.
    """

    group: Communicator | None = None
    num_leaders: int = 1
    index: int = 0
    stride: int = 1

    def leader_of(self, number: int) -> int:
        """The index of the leader of a gradient."""
        return number // self.stride % self.num_leaders

    def leads(self, number: int) -> bool:
        """Whether this neighbor leads a gradient."""
        return self.leader_of(number) == self.index

    def sum(
        self,
        gradients: Sequence[Gradient],
        sum_remote: Callable[[list[Gradient]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Sums gradients over the neighbors, and then over their counterparts.

        Args:
            gradients: gradients with the same shapes and numbers everywhere.
            sum_remote: sums those of the neighbors' sums that this one leads.

        Returns:
            The sums, bitwise identical on all neighbors.
        """
        if self.group is None:
            return sum_remote(list(gradients))
        sums = self.group.all_reduce([g.value for g in gradients])
        mine = [i for i, g in enumerate(gradients) if self.leads(g.number)]
        if mine:
            local_sums = [dataclasses.replace(gradients[i], value=sums[i]) for i in mine]
            for i, total in zip(mine, sum_remote(local_sums), strict=True):
                sums[i] = total
        return [
            self.group.broadcast(total, root=self.leader_of(g.number))
            for g, total in zip(gradients, sums, strict=True)
        ]
