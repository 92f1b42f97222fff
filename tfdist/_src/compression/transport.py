"""The connections over which gradients are summed, and the variables in which codecs keep state."""

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
# The state that a codec keeps for one gradient: variables by name.
Kept = Mapping[str, tf.Variable]


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient to compress.

    Attributes:
        value: a float32 tensor, with the same shape on all workers.
        number: the index of the gradient among the optimizer's gradients, the same on all workers.
        kept: the state that the codec keeps for this gradient on this worker: variables by name.
    """

    value: tf.Tensor
    number: int
    kept: Kept

    @property
    def shape(self) -> Shape:
        """The static shape of the gradient."""
        return tuple(self.value.shape)


def count(shape: Shape) -> int:
    """Returns the number of values in a tensor of this shape."""
    return math.prod(shape)


@dataclasses.dataclass(frozen=True)
class HostLeaders:
    """The division of gradients among neighbors, which are connected by fast links.

    The neighbors are the devices of a worker, or the workers of a host. They first sum their
    gradients exactly. Each gradient has a leader among the neighbors. The leader sums the gradient
    with its counterparts, the leaders of the same gradient in other groups of neighbors. It then
    broadcasts the result to its own neighbors.

    Attributes:
        group: the communicator that connects the neighbors; None if this device or worker has none.
        num_leaders: the number of neighbors that are leaders of gradients.
        index: the index of this device or worker among its neighbors. The first `num_leaders`
            neighbors are leaders, and the others lead no gradients.
        stride: the number of consecutive gradients that have the same leader.
    """

    group: Communicator | None = None
    num_leaders: int = 1
    index: int = 0
    stride: int = 1

    def leader_of(self, number: int) -> int:
        """Returns the index of the neighbor that leads the gradient with this number."""
        return number // self.stride % self.num_leaders

    def leads(self, number: int) -> bool:
        """Whether this device or worker leads the gradient with this number."""
        return self.leader_of(number) == self.index

    def sum(
        self,
        gradients: Sequence[Gradient],
        sum_remote: Callable[[list[Gradient]], list[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Sums gradients over the neighbors, and then over the other groups of neighbors.

        Args:
            gradients: the gradients of this device or worker. Their shapes and numbers must be the
                same on all neighbors and in all groups.
            sum_remote: a function that sums gradients over the other groups. It is called with the
                sums of the gradients that this device or worker leads, and returns their totals.

        Returns:
            The totals, in the order of `gradients`. They are bitwise identical on all neighbors.
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
    """Whether the workers of a host divide gradients among themselves.

    This is the case if there are several hosts, and a host has several workers.

    Args:
        hosts: for each worker, a number that identifies its host.
    """
    return 1 < len(set(hosts)) < len(hosts)


@dataclasses.dataclass(frozen=True)
class OnGpus:
    """The part of an `Exchange` that is used if the core encodes values in the memory of GPUs.

    Attributes:
        workers: the communicator that connects this replica's GPU with the GPUs of the same index
            on the other workers.
        split: as for `Exchange`, but creates communicators of these GPUs.
        devices: the division of gradients among the GPUs of this worker.
        all: this GPU's communicator with all other GPUs of all workers; None if each worker has
            only one GPU.
    """

    workers: CoreCommunicator
    split: Split
    devices: HostLeaders = HostLeaders()
    all: CoreCommunicator | None = None


class Exchange:
    """The connections over which one replica sums its gradients with all other replicas.

    Args:
        workers: the communicator that connects this replica with the replicas of the same index on
            the other workers.
        within_hosts: whether to also compress gradients that are sent to workers of the same host.
        devices: the division of gradients among the devices of this worker.
        split: a function that creates communicators for subsets of the workers, given a name and
            the members of this worker's subset. All workers must call it together, and a worker
            that belongs to no subset passes no members. It is required if `within_hosts` is False
            and `is_shared_out` is true. It is then called with the names "host" and "carriers".
        exact: the communicator for sums without compression. By default, this is `workers`.
        on_gpus: the connections between GPUs; None if the replicas do not train on GPUs.

    Attributes:
        workers: see the argument.
        exact: the communicator for sums without compression.
        within_hosts: see the argument.
        devices: see the argument.
        host: the division of gradients among the workers of this host, for codecs that the core
            does not run.
        leaders: the communicator that connects the leaders of the same gradients, one worker per
            host; None if this worker leads no gradients.
        encoded: like `workers`, but for values that the core encodes, which may be on GPUs.
        encoded_devices: like `devices`, but for values that the core encodes.
        encoded_host: like `host`, but for values that the core encodes.
        encoded_leaders: like `leaders`, but for values that the core encodes.
        of_all_gpus: the communicator through which the core sums over the GPUs of each worker and
            over all workers together; None if the core sums only over workers.
        compresses: whether any gradients are compressed. This is the case if there are several
            hosts, or if `within_hosts` is True and there are several workers.
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
        """Returns a copy that one replica can use without the worker's other replicas.

        The copy has no `of_all_gpus`, because all devices of a worker must call operations of that
        communicator together.
        """
        other = copy.copy(self)
        other.of_all_gpus = None
        return other

    @property
    def shape(self) -> tuple[object, ...]:
        """The properties that become constants of a graph, if the codec `follows_hosts`."""
        host = self.host
        leads = "all" if self.leaders is self.workers else self.leaders is not None
        return host.group is not None, host.num_leaders, host.index, host.stride, leads

    def leads(self, number: int) -> bool:
        """Whether this replica exchanges the gradient with this number with other hosts."""
        return self.devices.leads(number) and self.host.leads(number)


First = Callable[[str, tuple[int, ...]], tf.Tensor]


class State(tf.Module):  # type: ignore[misc]
    """The variables in which a codec keeps its state for an optimizer on this worker.

    With error feedback, for example, the variables contain the accumulated encoding error. Their
    values differ between workers. A `tf.train.Checkpoint` of the optimizer includes the variables.
    For each kind of state, such as "error", this object has an attribute with the same name. The
    attribute is a dict of float32 variables, and each key consists of a gradient's number and the
    owner.

    Args:
        owner: a text that identifies the worker. A variable is restored from a checkpoint only if
            the owner is the same as when the checkpoint was saved.
    """

    def __init__(self, owner: str = "") -> None:
        super().__init__(name="compression_state")
        self._owner = owner
        self._names: list[str] = []
        self._loaded = _Untracked({})

    def make(
        self, name: str, number: int, shape: tuple[int, ...], first: First, device: str
    ) -> None:
        """Creates a variable, unless one with this shape already exists on the device.

        If it exists on another device, a new variable with the same value is created on `device`.

        Args:
            name: the kind of state, such as "error".
            number: the number of the gradient to which the state belongs.
            shape: the variable's shape.
            first: a function that returns the initial value. It is not called if `load` has
                provided a value with this shape.
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
        # Create the variable directly, because a strategy in scope would mirror a `tf.Variable`.
        with tf.init_scope(), tf.device(device):
            value = tf.constant(loaded, tf.float32) if fits else first(name, shape)
            variables[key] = ResourceVariable(
                value, trainable=False, name=f"compression_{name}_{number}"
            )

    def move(self, owner: str) -> None:
        """Changes the owner of the variables, for example after this worker's rank has changed."""
        if owner == self._owner:
            return
        self._owner = owner
        for name in self._names:
            variables = getattr(self, name)
            moved = {self._key(int(key.split()[0])): v for key, v in variables.items()}
            setattr(self, name, moved)

    def of(self, number: int) -> Kept:
        """Returns the variables of the gradient with this number, by name."""
        found = {name: getattr(self, name).get(self._key(number)) for name in self._names}
        return {name: variable for name, variable in found.items() if variable is not None}

    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the values of all variables, with keys such as "error/0" for gradient 0."""
        return {
            f"{name}/{key.split()[0]}": variable.numpy()
            for name in self._names
            for key, variable in getattr(self, name).items()
        }

    def load(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Assigns values to variables.

        Values for variables that do not exist yet are stored, and assigned when `make` creates the
        variables.

        Args:
            values: the values, as returned by the method `values`.
        """
        self._loaded.value = dict(values)
        for name in self._names:
            for key, variable in getattr(self, name).items():
                value = self._loaded.value.pop(f"{name}/{key.split()[0]}", None)
                if value is not None and value.shape == tuple(variable.shape):
                    variable.assign(value)

    def _key(self, number: int) -> str:
        return f"{number} on {self._owner}" if self._owner else str(number)


class _Untracked:
    """Wraps a dict, so that `tf.Module` does not include it in checkpoints."""

    def __init__(self, value: dict[str, np.ndarray[Any, Any]]) -> None:
        self.value = value
