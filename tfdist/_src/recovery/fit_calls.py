"""The calls of `fit` of a job, of which a process that comes later goes on with the running one."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist._src.comm.gpu_communicator import GpuCommunicator
from tfdist._src.keras.saving.files import in_stages
from tfdist.errors import ProgramMismatchError


class CallHasEnded(Exception):
    """Leaves a call of `fit` that the workers of the job have ended before this process came.

    Args:
        history: what its `History` was.
    """

    def __init__(self, history: dict[str, Any]) -> None:
        super().__init__()
        self.history = history


class FitCalls:
    """The calls of `fit` on a group of workers that may change, as one of them counts them.

    A script calls `fit` in the same order on all workers, so a number tells which call it is.

    Attributes:
        number: of the last call, from 1.
        running: whether it has not ended.
    """

    def __init__(self) -> None:
        self.number, self.running = 0, False
        self._description = ""
        self._ended: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Counts a call."""
        self._description = ""
        self.number, self.running = self.number + 1, True

    def describe(self, arguments: dict[str, Any], model: keras.Model) -> None:
        """Notes what must be the same on all workers.

        Args:
            arguments: those of the running call, as far as they are compared.
            model: in training, with its variables.
        """
        self._description = (
            f"fit {arguments or ''}".strip()
            + f" of a model {_weights_of(model)} and the optimizer {type(model.optimizer).__name__}"
            + f" on {_devices_of(model)}"
        )

    def end(self, history: Any) -> None:
        """Keeps the `History` of the running call for the processes that come later."""
        self._description, self.running = "", False
        kept = {"epoch": getattr(history, "epoch", []), "history": getattr(history, "history", {})}
        self._ended.append(json.loads(json.dumps(kept, default=float)))  # plain numbers

    @property
    def request(self) -> str:
        """What this process says of the call that it is in."""
        return json.dumps({"call": self.number, "description": self._description})

    def judge(self, request: str) -> str | None:
        """Why a process cannot join in its call of `fit`; "" if it has to wait, None if it can.

        Args:
            request: the process's `request`.

        Raises:
            ValueError: it is malformed.
        """
        try:
            asked = json.loads(request)
            call, description = asked["call"], asked["description"]
        except (LookupError, TypeError) as error:
            raise ValueError(f"it sent a malformed request: {error!r}") from None
        if type(call) is not int or call < 1:
            raise ValueError(f"it sent a malformed request: call {call!r}")
        if call < self.number:  # Behind the last call there is none to join in.
            return json.dumps({"ended": self._ended[call - 1]})
        mine = self._description
        if call != self.number or not mine:
            return ""
        return None if description == mine else json.dumps({"description": mine})

    def raise_for(self, reason: str, me: str) -> NoReturn:
        """Raises the error for what `judge` of another worker has returned.

        Raises:
            CallHasEnded: the workers have ended this call.
            ProgramMismatchError: they call `fit` differently.
        """
        answer = json.loads(reason)
        if "ended" in answer:
            raise CallHasEnded(answer["ended"])
        raise ProgramMismatchError(
            f"{me} cannot join the running job, which goes on without it: it calls "
            f"{self._description} where the workers of the job call {answer['description']}. "
            "Run one script, with the same arguments and data, on all workers."
        )


def past_history(model: keras.Model, ended: CallHasEnded) -> keras.callbacks.History:
    """What a call of `fit` returns that has ended before this process came."""
    history = keras.callbacks.History()
    history.set_model(model)
    history.epoch = ended.history["epoch"]
    history.history = ended.history["history"]
    model.history = history
    return history


def _devices_of(model: keras.Model) -> str:
    """The devices that a process trains on, of which every one has as many."""
    extended = model.distribute_strategy.extended
    kind = tf.DeviceSpec.from_string(extended.worker_devices[0]).device_type
    where = " with sums on them" if isinstance(extended.replicas[0], GpuCommunicator) else ""
    return f"{len(extended.worker_devices)} {kind}{where}"


def _weights_of(model: keras.Model) -> str:
    if in_stages(model):
        return "in stages"  # of which each worker holds others
    weights = [(tuple(w.shape), str(w.dtype), bool(w.trainable)) for w in model.weights]
    digest = hashlib.sha256(repr(weights).encode()).hexdigest()[:8]
    return f"with {len(weights)} weights (shapes and types: {digest})"
