"""The native communicators of a group's workers: opened at first use, and again after a change."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from tfdist._src.cluster import Session, observe
from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.comm import gpu, registry
from tfdist._src.comm.local_communicators import (
    open_local_communicators,
    reopen_local_communicators,
)
from tfdist._src.comm.native_communicator import NativeCommunicator, open_communicator
from tfdist._src.options import Options

ON_GPUS = "workers' GPUs"
"""The name of the communicator whose operations run on the processes' GPUs."""

_DEVICES = "devices"


class Communicators:
    """A process's native communicators with the other workers, and among its devices.

    Args:
        options: the settings.
        label: a part of their names, for groups within one process; "" for the job's.
    """

    def __init__(self, options: Options, label: str = "") -> None:
        self._options = options
        self._on_gpus = f"{ON_GPUS}, {label}" if label else ON_GPUS
        self._of_devices = f"{_DEVICES}, {label}" if label else _DEVICES
        self._named: dict[str, NativeCommunicator] = {}
        self._timeouts: dict[str, float] = {}
        self._warned_of_timeout = False
        self._parts: dict[str, NativeCommunicator | None] = {}
        self._gpus: list[str] = []
        self._devices: list[NativeCommunicator] = []
        self._device_names: list[str] = []

    @property
    def local(self) -> list[NativeCommunicator]:
        """Those of this worker's devices."""
        return self._devices

    @property
    def exist(self) -> bool:
        """Whether there is one with the other workers."""
        return bool(self._named)

    def named(self, session: Session, name: str, timeout: float | None) -> NativeCommunicator:
        """The communicator of all workers under a name, opened at the first call."""
        if name not in self._named:
            options = self._with(timeout)
            found = gpu.find(self._gpus, options) if name == self._on_gpus else ()
            everyone = range(session.size)
            communicator = open_communicator(session, name, everyone, options, found)
            assert communicator is not None
            session.on_peer_lost(communicator.context.aborter())
            self._named[name] = communicator
            observe(session, self._options)
            self._timeouts[name] = options.collective_timeout
        elif timeout and timeout != self._timeouts[name]:
            self._warn_of_timeout(session, timeout, self._timeouts[name])
        return self._named[name]

    def on_gpus(
        self, session: Session, devices: list[str], timeout: float | None
    ) -> list[NativeCommunicator]:
        """For each GPU of this worker, its handle on the communicator of those of all workers."""
        self._gpus = self._gpus or devices
        communicator = self.named(session, self._on_gpus, timeout)
        return [communicator.on_gpu(index) for index in range(len(devices))]

    def part(
        self,
        session: Session,
        name: str,
        members: list[int],
        timeout: float | None,
        gpus: Sequence[str],
    ) -> NativeCommunicator | None:
        """A communicator of some workers, opened at the first call."""
        key = f"{name} of {members}"
        if key not in self._parts:
            options = self._with(timeout)
            found = gpu.find(gpus, options) if members else ()
            part = open_communicator(session, name, members, options, found)
            if part is not None:
                session.on_peer_lost(part.context.aborter())
            self._parts[key] = part
        return self._parts[key]

    def of_devices(self, session: Session, names: list[str]) -> list[NativeCommunicator]:
        """For each device of this worker, its communicator with the others; opened once."""
        if not self._devices:
            self._devices = open_local_communicators(self._of_devices, names, self._options)
            self._device_names = names
            self._watch_devices(session)
        return self._devices

    def close(self, cause: str | None = None) -> None:
        """Closes all of them.

        Args:
            cause: why they have failed: nobody is waited for.
        """
        for communicator in (*self._named.values(), *self._parts.values(), *self._devices):
            if communicator is not None:
                _close(communicator, cause)

    def close_for_change(self, cause: str | None) -> None:
        """Closes all of them, and those that the user has split off, whose ranks were others."""
        self.close(cause)
        self._parts.clear()
        for communicator in registry.every():
            if isinstance(communicator, NativeCommunicator):
                _close(communicator, cause)

    def reopen(self, session: Session) -> None:
        """Connects the same objects with the workers of another session; all workers call this.

        Rank 0's list of names counts: a worker that is new to the group may have others.
        """
        if self._devices:
            reopen_local_communicators(
                self._devices, self._of_devices, self._device_names, self._options
            )
            self._watch_devices(session)
        own = json.dumps(list(self._timeouts.items()))
        chiefs: dict[str, float] = dict(
            json.loads(session.exchange("communicators", own.encode())[0])
        )
        before, self._named = self._named, {}
        for name, timeout in chiefs.items():
            communicator = before.pop(name, None)
            if communicator is None:
                self.named(session, name, timeout)
                continue
            self._named[name] = communicator
            communicator.reopen(session, self._with(timeout))
            session.on_peer_lost(communicator.context.aborter())
        self._timeouts = chiefs
        observe(session, self._options)

    def _watch_devices(self, session: Session) -> None:
        for communicator in self._devices:
            session.on_peer_lost(communicator.context.aborter())

    def _with(self, timeout: float | None) -> Options:
        if not timeout:
            return self._options
        return dataclasses.replace(self._options, collective_timeout=timeout)

    def _warn_of_timeout(self, session: Session, ignored: float, used: float) -> None:
        if self._warned_of_timeout or not session.topology.is_chief:
            return
        self._warned_of_timeout = True
        say(
            "tfdist: the first strategy of a process sets `timeout_seconds` of "
            f"`communication_options` for all. Received: {ignored:g} s for a later strategy, whose "
            f"collectives keep the {used:g} s of the first. Pass it to the first one, or set "
            "TFDIST_COLLECTIVE_TIMEOUT."
        )


def _close(communicator: NativeCommunicator, cause: str | None) -> None:
    if cause:
        communicator.abort(cause)
    communicator.close()
