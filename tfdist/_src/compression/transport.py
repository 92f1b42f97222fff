"""The routes of gradients to the other workers, and the variables that codecs keep."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.comm.device_communicator import GpuCommunicator
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.internals.tensorflow import ResourceVariable

Shape = tuple[int, ...]
# The codec state of one gradient, by name.
Kept = Mapping[str, tf.Variable]


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient to be compressed.

    Attributes:
        value: a float32 tensor, of the same shape on all workers.
        number: its index among the optimizer's gradients, the same on all workers.
        kept: its codec state on this worker.
    """

    value: tf.Tensor
    number: int
    kept: Kept

    @property
    def shape(self) -> Shape:
        """Its static shape."""
        return tuple(self.value.shape)


def count(shape: Shape) -> int:
    """The number of values."""
    return math.prod(shape)


@dataclasses.dataclass(frozen=True)
class HostLeaders:
    """Neighbors with fast links: the devices of a worker, or the workers of a host.

    They sum their gradients exactly. Each leader exchanges some of the sums with its counterparts
    in other groups of neighbors, and broadcasts the results to its own neighbors.

    Attributes:
        group: the neighbors' communicator; None if this device or worker has no neighbors.
        num_leaders: the number of neighbors that lead gradients.
        index: the index of this device or worker among its neighbors. Neighbors with an index of at
            least `num_leaders` lead no gradients.
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
            sum_remote: called with the neighbors' sums of the gradients that this neighbor leads;
                returns their totals over its counterparts.

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


Split = Callable[[str, list[int]], CoreCommunicator | None]


def is_shared_out(hosts: Sequence[int]) -> bool:
    """Whether the workers of a host divide gradients: on several hosts, some with several workers.

    Args:
        hosts: the host number of each worker.
    """
    return 1 < len(set(hosts)) < len(hosts)


@dataclasses.dataclass(frozen=True)
class OnGpus:
    """A route's resources on GPUs, for values that the core encodes.

    Attributes:
        workers: the communicator of this replica's GPU with its counterparts on the other workers.
        split: as for `Exchange`, but for these GPUs.
        devices: how the GPUs of this worker divide gradients.
        all: this GPU's handle on the communicator of all GPUs, if workers have several.
    """

    workers: CoreCommunicator
    split: Split
    devices: HostLeaders = HostLeaders()
    all: CoreCommunicator | None = None


class Exchange:
    """One replica's route: exact within a worker and a host, compressed between hosts.

    Args:
        workers: the communicator of this replica with its counterparts on the other workers.
        within_hosts: whether to also compress between workers of the same host.
        devices: how the devices of this worker divide gradients.
        split: creates a communicator with some of the workers under a name; called by all workers
            together, with no members on a worker that belongs to no group. Required, and called for
            "host" and "carriers", unless `within_hosts` is set or `is_shared_out` is false.
        exact: the communicator for sums without compression, if it is not `workers`.
        on_gpus: the communicators of this route's GPUs, if replicas train on GPUs.

    Attributes:
        workers: see the argument.
        exact: the communicator for sums without compression.
        within_hosts: see the argument.
        devices: see the argument.
        host: how the workers of this host divide gradients, if the core does not divide them.
        leaders: the communicator of the workers, one per host, that lead the same gradients as this
            worker; None if it leads none.
        encoded: as `workers`, for values that the core encodes.
        encoded_devices: as `devices`, for values that the core encodes.
        encoded_host: as `host`, for values that the core encodes.
        encoded_leaders: as `leaders`, for values that the core encodes.
        of_all_gpus: the communicator in which the core also sums over a worker's GPUs; None if it
            does not.
        compresses: whether there is anything to compress: several hosts, or several workers and
            `within_hosts`.
    """

    def __init__(
        self,
        workers: CoreCommunicator,
        *,
        within_hosts: bool,
        devices: HostLeaders = HostLeaders(),
        split: Split | None = None,
        exact: Communicator | None = None,
        on_gpus: OnGpus | None = None,
    ) -> None:
        self.workers = workers
        self.exact: Communicator = workers if exact is None else exact
        self.encoded = workers if on_gpus is None else on_gpus.workers
        self.of_all_gpus = None if on_gpus is None else on_gpus.all
        self.encoded_devices = devices if on_gpus is None else on_gpus.devices
        self.within_hosts = within_hosts
        self.devices = devices
        self.host = HostLeaders()
        self.leaders: CoreCommunicator | None = workers
        self.encoded_host = self.host
        self.encoded_leaders: CoreCommunicator | None = self.encoded
        hosts: dict[int, list[int]] = {}
        here = workers.context
        for rank, host in enumerate(here.hosts):
            hosts.setdefault(host, []).append(rank)
        self.compresses = len(hosts) > 1 or (within_hosts and len(here.hosts) > 1)
        if within_hosts or not is_shared_out(here.hosts):
            return
        assert split is not None
        colocated = hosts[here.hosts[here.rank]]
        num_leaders, index = min(map(len, hosts.values())), colocated.index(here.rank)
        neighbors = colocated if len(colocated) > 1 else []
        leaders = [ranks[index] for ranks in hosts.values()] if index < num_leaders else []
        group = split("host", neighbors)
        self.host = HostLeaders(group, num_leaders, index, stride=devices.num_leaders)
        self.leaders = split("carriers", leaders)
        self.encoded_host, self.encoded_leaders = self.host, self.leaders
        if on_gpus is not None:
            gpus = on_gpus.split("host", neighbors)
            if gpus is not None and group is not None:
                of_host = GpuCommunicator(gpus, group)
                self.encoded_host = dataclasses.replace(self.host, group=of_host)
            self.encoded_leaders = on_gpus.split("carriers", leaders)

    def alone(self) -> Exchange:
        """Returns a copy without `of_all_gpus`, which a worker's devices must call together."""
        other = copy.copy(self)
        other.of_all_gpus = None
        return other

    @property
    def shape(self) -> tuple[object, ...]:
        """The properties of the route that become part of a graph, if its codec `follows_hosts`."""
        host = self.host
        leads = "all" if self.leaders is self.workers else self.leaders is not None
        return host.group is not None, host.num_leaders, host.index, host.stride, leads

    def leads(self, number: int) -> bool:
        """Whether this replica exchanges a gradient with other hosts."""
        return self.devices.leads(number) and self.host.leads(number)


First = Callable[[str, tuple[int, ...]], tf.Tensor]


class State(tf.Module):  # type: ignore[misc]
    """The variables that a worker's codec keeps for an optimizer.

    They differ between workers: with error feedback, they hold the accumulated encoding error.
    A `tf.train.Checkpoint` of the optimizer includes them. Attributes of this object, with names
    such as `error`, are dicts from the gradients' and the worker's numbers to float32 variables.

    Args:
        owner: identifies the worker; a checkpoint restores only variables of the same owner.
    """

    def __init__(self, owner: str = "") -> None:
        super().__init__(name="compression_state")
        self._owner = owner
        self._names: list[str] = []
        self._loaded = _Untracked({})

    def make(
        self, name: str, number: int, shape: tuple[int, ...], first: First, device: str
    ) -> None:
        """Creates a variable, unless one of this shape exists on the device.

        A variable that exists on another device is moved.

        Args:
            name: the name of the state.
            number: the number of its gradient.
            shape: the variable's shape.
            first: returns its initial value, unless one was loaded.
            device: the variable's device.
        """
        if name not in self._names:
            self._names.append(name)
            setattr(self, name, {})
        variables, key = getattr(self, name), self._key(number)
        existing = variables.get(key)
        if existing is not None and tuple(existing.shape) == shape:
            if existing.device.endswith(device):
                return
            with tf.init_scope():
                loaded = existing.numpy()
        else:
            loaded = self._loaded.value.pop(f"{name}/{number}", None)
        fits = loaded is not None and loaded.shape == shape
        # Not mirrored by a strategy in scope.
        with tf.init_scope(), tf.device(device):
            value = tf.constant(loaded, tf.float32) if fits else first(name, shape)
            variables[key] = ResourceVariable(
                value, trainable=False, name=f"compression_{name}_{number}"
            )

    def move(self, owner: str) -> None:
        """Assigns the state to another owner; the values stay the same."""
        if owner == self._owner:
            return
        self._owner = owner
        for name in self._names:
            variables = getattr(self, name)
            moved = {self._key(int(key.split()[0])): v for key, v in variables.items()}
            setattr(self, name, moved)

    def of(self, number: int) -> Kept:
        """The variables of a gradient, by name."""
        found = {name: getattr(self, name).get(self._key(number)) for name in self._names}
        return {name: variable for name, variable in found.items() if variable is not None}

    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """All values, by name and gradient number, such as `error/0`."""
        return {
            f"{name}/{key.split()[0]}": variable.numpy()
            for name in self._names
            for key, variable in getattr(self, name).items()
        }

    def load(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Sets variables to the values from `values`, including variables created later."""
        self._loaded.value = dict(values)
        for name in self._names:
            for key, variable in getattr(self, name).items():
                value = self._loaded.value.pop(f"{name}/{key.split()[0]}", None)
                if value is not None and value.shape == tuple(variable.shape):
                    variable.assign(value)

    def _key(self, number: int) -> str:
        return f"{number} on {self._owner}" if self._owner else str(number)


class _Untracked:
    """Excludes a value from checkpoints."""

    def __init__(self, value: dict[str, np.ndarray[Any, Any]]) -> None:
        self.value = value
