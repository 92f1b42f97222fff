"""Tells Ray's workers where they are, before the training function begins."""

from __future__ import annotations

import html
import json
import os
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from tfdist._src.cluster.auth.handshake import VARIABLE as SECRET
from tfdist._src.cluster.auth.handshake import new_secret
from tfdist._src.launch.job.forwarded import forwarded
from tfdist._src.launch.job.ports import Reservation

# Held for as long as the worker's process lives, so that no other program gets its port.
_held: list[Reservation] = []


@dataclass
class TfdistConfig(BackendConfig):  # type: ignore[misc]
    """How workers of Ray Train become workers of tfdist.

    Attributes:
        settings: environment variables for all workers; the driver's own `TFDIST_*` by default.
            They are set before TensorFlow is imported.
    """

    settings: dict[str, str] | None = field(default=None, repr=False)  # Values may be secret.

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray calls."""
        return TfdistBackend

    def to_dict(self) -> dict[str, Any]:
        """What Ray shows of it: the names of the settings."""
        return {"settings": sorted(self.settings or {})}

    def _repr_html_(self) -> str:
        return html.escape(f"TfdistConfig({self.to_dict()})")

    def __post_init__(self) -> None:
        if self.settings is None:
            self.settings = forwarded(os.environ, [])


class TfdistBackend(Backend):  # type: ignore[misc]
    """Gives each worker its `TF_CONFIG`, and all of them a secret that only they have."""

    def on_start(self, worker_group: Any, backend_config: TfdistConfig) -> None:
        """Called by Ray once all workers run, and again after they have been started anew."""
        addresses = worker_group.execute(_address)
        settings = {SECRET: new_secret(), **(backend_config.settings or {})}
        ray.get(
            [
                worker_group.execute_single_async(
                    rank, _set_place, addresses=addresses, index=rank, settings=settings
                )
                for rank in range(len(addresses))
            ]
        )


def _address() -> str:
    """This worker's address, at a port that is free."""
    host = ray.util.get_node_ip_address()
    _held.append(Reservation(1))
    (port,) = _held[-1].ports
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _set_place(addresses: list[str], index: int, settings: dict[str, str]) -> None:
    os.environ.update(settings)
    place = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    os.environ["TF_CONFIG"] = json.dumps(place)
