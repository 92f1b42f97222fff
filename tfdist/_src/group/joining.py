"""This process's membership in its group of workers: joined once, shared by all strategies."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence

import tensorflow as tf

from tfdist._src.cluster import Found, Joiner, Membership, Topology, complete, meet, meet_or_join
from tfdist._src.cluster.this_worker import note_joined
from tfdist._src.comm import flight_log, registry
from tfdist._src.comm.one_rank import OneRank
from tfdist._src.group.group import Group, introduce
from tfdist._src.options import Options
from tfdist.errors import ClusterError

_joined: Group | None = None
_joined_by: Topology | None = None  # the cluster as the program describes it


def join(found: Found, *, elastic: bool = False) -> Group:
    """Joins the group, or returns the membership that this process already has.

    Args:
        found: the cluster and this process's rank in it.
        elastic: whether the workers may become others; see `Group`.

    Raises:
        ClusterError: the process is already a member of another group.
        RendezvousError: not all workers connected in time.
    """
    global _joined, _joined_by
    topology = found.topology
    if topology.size == 1 and not (elastic or _is_same(topology, _joined_by)):
        if _joined is None:
            # In a job, "workers" is the communicator of all its workers.
            registry.put("workers", OneRank("workers"))
        return _by_itself(topology)
    if _joined is None:
        _joined, _joined_by = _join(found, elastic), topology
        note_joined(_joined.topology, is_admitted=_joined.joiner is None)
    elif not _is_same(topology, _joined_by):
        raise ClusterError(
            f"This process is {_joined.topology.me} of a running group and cannot become "
            f"{topology.me} of another. Start a new process for another cluster."
        )
    return _joined


def join_devices(devices: Sequence[str]) -> Group:
    """The group of one process that all its strategies of these devices share.

    Args:
        devices: TensorFlow's names, as `tf.config.list_logical_devices` gives them.
    """
    key = tuple(devices)
    if key not in _of_devices:
        label = ", ".join(device.rsplit("device:")[-1] for device in devices)
        _of_devices[key] = _by_itself(Topology(), label)
    return _of_devices[key]


_of_devices: dict[tuple[str, ...], Group] = {}


def _by_itself(topology: Topology, label: str = "") -> Group:
    options = Options.from_environment()
    return Group(topology, meet(Topology(), options), options, label=label)


def joined_group() -> Group | None:
    """The group that this process has joined, if any."""
    return _joined


def _alone(topology: Topology) -> Topology:
    """This process by itself, until it is admitted to the running job that it has found."""
    return dataclasses.replace(topology, workers=(topology.me,), rank=0)


def _is_same(topology: Topology, other: Topology | None) -> bool:
    return other is not None and (topology.fingerprint(), topology.rank) == (
        other.fingerprint(),
        other.rank,
    )


def _join(found: Found, elastic: bool) -> Group:
    flight_log.survive_signal()
    topology, options = complete(found, Options.from_environment())
    met = meet_or_join(topology, options) if options.elastic else meet(topology, options)
    joiner = None
    if isinstance(met, Joiner):
        joiner, topology = met, _alone(topology)
        met = meet(topology, options)
    introduce(met)
    group = Group(topology, met, options, elastic=elastic or joiner is not None, joiner=joiner)
    registry.forget_alone("workers")
    group.agree("TensorFlow", f"{tf.__version__} on Python {platform.python_version()}")
    # A worker may be lost before the first training.
    if joiner is None and set(group.exchange("elastic", str(options.elastic))) == {"True"}:
        group.membership = Membership(met, options)
    return group
