"""Counts the calls of `fit` of a job, so that a joining process can find the running call.

If all workers raise an error, the call ends on all of them, and the group remains for the next
call.
"""

import hashlib
import json
import threading
import time
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfdist._src.cluster import Membership
from tfdist._src.cluster.session.exit_reason import describe
from tfdist._src.comm.device_communicator import GpuCommunicator
from tfdist._src.group import Group
from tfdist._src.keras.fit.reentry import Reentry
from tfdist._src.keras.fit.training_data import TrainingData
from tfdist._src.keras.fit.validation_data import ValidationData
from tfdist._src.keras.saving.files import is_pipeline_model
from tfdist._src.log import logger
from tfdist._src.snapshots.workers import broadcast_bytes, workers_of
from tfdist._src.strategy.extended import extended_of
from tfdist.errors import GroupLostError, ProgramMismatchError


class FitAlreadyEnded(Exception):
    """Raised to leave a call of `fit` that the other workers ended before this process joined.

    Args:
        history: the contents of the `History` of this call.
    """

    def __init__(self, history: dict[str, Any]) -> None:
        super().__init__()
        self.history = history


class FitCalls:
    """Counts this worker's calls of `fit`, in a group of workers that may change.

    The same script runs on all workers, so the number of a call identifies it on all workers.

    Attributes:
        number: the number of the last call that has begun. The first call has the number 1.
        running: whether the last call is still running.
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
        """Records the properties of the running call that must be the same on all workers.

        Args:
            arguments: the arguments of `fit` that are compared.
            model: the model in training, with its variables.
        """
        self._description = (
            f"fit {arguments or ''}".strip()
            + f" of a model {_weights_of(model)} and the optimizer {type(model.optimizer).__name__}"
            + f" on {_devices_of(model)}"
        )

    def end(self, history: Any) -> None:
        """Keeps the `History` of the running call for processes that join later."""
        self._description, self.running = "", False
        kept = {"epoch": getattr(history, "epoch", []), "history": getattr(history, "history", {})}
        self._ended.append(json.loads(json.dumps(kept, default=float)))  # plain numbers

    @property
    def request(self) -> str:
        """The description of the current call, which this process sends when it asks to join."""
        return json.dumps({"call": self.number, "description": self._description})

    def judge(self, request: str) -> str | None:
        """Returns why a process cannot join; None if it can join, or "" if it has to wait.

        Args:
            request: the `request` of the process.

        Raises:
            ValueError: the request is malformed.
        """
        try:
            asked = json.loads(request)
            call, description = asked["call"], asked["description"]
        except (LookupError, TypeError) as error:
            raise ValueError(f"it sent a malformed request: {error!r}") from None
        if type(call) is not int or call < 1:
            raise ValueError(f"it sent a malformed request: call {call!r}")
        if call < self.number:  # An ended call cannot be joined.
            return json.dumps({"ended": self._ended[call - 1]})
        mine = self._description
        if call != self.number or not mine:
            return ""
        return None if description == mine else json.dumps({"description": mine})

    def raise_for(self, reason: str, me: str) -> NoReturn:
        """Raises the error for a reason that another worker's `judge` has returned.

        Raises:
            FitAlreadyEnded: the workers have ended this call.
            ProgramMismatchError: the workers call `fit` differently.
        """
        answer = json.loads(reason)
        if "ended" in answer:
            raise FitAlreadyEnded(answer["ended"])
        raise ProgramMismatchError(
            f"{me} cannot join the running job, which continues without it: it calls "
            f"{self._description} where the workers of the job call {answer['description']}. Run "
            "one script, with the same arguments and data, on all workers."
        )


def past_history(model: keras.Model, ended: FitAlreadyEnded) -> keras.callbacks.History:
    """Returns the history of a call of `fit` that ended before this process joined."""
    history = keras.callbacks.History()
    history.set_model(model)
    history.epoch = ended.history["epoch"]
    history.history = ended.history["history"]
    model.history = history
    return history


def _devices_of(model: keras.Model) -> str:
    """Describes the devices of this process; all workers need the same number and type."""
    extended = extended_of(model.distribute_strategy)
    kind = tf.DeviceSpec.from_string(extended.worker_devices[0]).device_type
    where = " with sums on them" if isinstance(extended.replicas[0], GpuCommunicator) else ""
    return f"{len(extended.worker_devices)} {kind}{where}"


def _weights_of(model: keras.Model) -> str:
    if is_pipeline_model(model):
        return "in stages"  # Workers may hold different weights.
    weights = [(tuple(w.shape), str(w.dtype), bool(w.trainable)) for w in model.weights]
    digest = hashlib.sha256(repr(weights).encode()).hexdigest()[:8]
    return f"with {len(weights)} weights (shapes and types: {digest})"


def allow_reentry(model: Any, data: TrainingData, *, keeps_rows: bool) -> Reentry:
    """Lets training data continue with the same iterators when `fit` is entered again.

    Args:
        model: the model in training.
        data: the training data.
        keeps_rows: whether each worker keeps its number of rows per batch when the group changes;
            otherwise, the global batch keeps its number of rows.
    """
    extended = extended_of(model.distribute_strategy)
    keep_validation(model, data)
    came_later = data.reentry is not None and data.reentry.came_later
    data.reentry = Reentry(
        keeps_rows=keeps_rows,
        workers=lambda: extended.group.topology.size,
    )
    data.reentry.came_later = came_later
    return data.reentry


def keep_validation(model: Any, data: TrainingData) -> ValidationData:
    """Returns the `ValidationData` of a call of `fit`, and creates it if it does not exist.

    Args:
        model: the model in training.
        data: the training data.
    """
    extended = extended_of(model.distribute_strategy)

    def broadcast(contents: bytes, source: int) -> bytes:
        return broadcast_bytes(contents, source, workers_of(extended))

    if data.validation is None:
        data.validation = ValidationData(model, broadcast)
    return data.validation


_PAUSE_SECONDS = 1.0


def whereabouts(group: Group, calls: FitCalls) -> str:
    """Describes, for the other workers, which call of `fit` this worker is in and whether it waits.

    Args:
        group: the workers.
        calls: this worker's calls of `fit`.
    """
    regrouping = group.membership is not None and group.membership.regrouping
    waits = regrouping or group.in_any_step or bool(group.session.awaited)
    return json.dumps({"call": calls.number if calls.running else 0, "waits": waits})


def watch_others(group: Group, call: int, error: BaseException) -> None:
    """Watches whether other workers wait for this worker in a call of `fit` that has failed here.

    If they have waited for too long, this worker leaves the group, so that they can continue
    without it. The function starts a thread, and does not wait.

    Args:
        group: the workers.
        call: the number of the call that an error has ended on this worker.
        error: the error.
    """
    membership = group.membership
    if membership is None or isinstance(error, GroupLostError):  # The others do not wait.
        return
    watch = threading.Thread(
        target=_watch, args=(group, membership, call, describe(error)), daemon=True
    )
    watch.start()


def _watch(group: Group, membership: Membership, call: int, error: str) -> None:
    since = time.monotonic()
    while not membership.closed:
        running = [one for one in map(json.loads, membership.inquire()) if one["call"] == call]
        if not running:
            return
        now = time.monotonic()
        if not any(one["waits"] for one in running):
            since = now
        elif now - since >= group.options.stall_warning:
            reason = f"{error}. This error has ended call {call} of `fit` on that worker only"
            logger.info(
                f"{group.topology.me} leaves the others, which continue without it: {reason}."
            )
            membership.close(reason)
            group.session.close(reason)
            return
        time.sleep(_PAUSE_SECONDS)
