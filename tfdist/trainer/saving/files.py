"""Saving when all workers run the same script: the chief writes, and every worker finds the file.

The chief writes to a temporary name beside the path and renames at the end, so that a partial file
is never read, then notifies the others. Their save calls return only then, so that they can load
the file next. A worker whose path differs from the chief's writes the file itself. A save on the
chief alone waits for no other worker, nor does the creation of variables in Keras during it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from tfdist.cluster import Session
from tfdist.cluster.net.wait_messages import say
from tfdist.errors import RendezvousError
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.strategies.group import Group
from tfdist.strategies.variable_creation import alone
from tfdist.trainer.patching import patch
from tfdist.trainer.saving.sharded_files import has_sharded_optimizer, with_full_optimizer

_NOTICE = "saved"
_OTHER_PATH_SECONDS = 2.0


def install() -> None:
    """Replaces the functions that write model files."""
    patch("saving_lib.save_model", _chief_writes)
    patch("saving_lib.save_weights_only", _chief_writes)
    patch("legacy_h5_format.save_model_to_hdf5", _chief_writes)
    patch("Model.export", _chief_writes)


def group_of(model: Any) -> Group | None:
    """The group of workers that train a model; None if there is only one."""
    strategy = getattr(model, "_distribute_strategy", None)
    extended = getattr(strategy, "extended", None)
    if isinstance(extended, ReplicatedExtended) and extended.process_count > 1:
        # The full model of a PipelineModel exists only on the chief.
        return None if extended.in_stages and not in_stages(model) else extended.group
    return None


def awaits_admission(model: Any) -> bool:
    """Whether this process waits to be admitted to the job that trains a model."""
    extended = getattr(getattr(model, "_distribute_strategy", None), "extended", None)
    return isinstance(extended, ReplicatedExtended) and extended.group.joiner is not None


def _chief_writes(write: Callable[..., Any]) -> Callable[..., Any]:
    def write_alone(*args: Any, **kwargs: Any) -> Any:
        with alone():
            return write(*args, **kwargs)

    @functools.wraps(write)
    def chief_writes(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if awaits_admission(model):
            say(f"tfdist: {filepath} is not written: this process waits to be admitted to the job.")
            return None
        group, together = group_of(model), needs_gathering(model)
        with _full_model(model) as full:
            if group is None or not isinstance(filepath, (str, os.PathLike)):
                return write_alone(full, filepath, *args, **kwargs)
            path = os.path.abspath(filepath)
            if together:
                return _write_together(write_alone, full, str(filepath), group, args, kwargs)
            if not group.topology.is_chief and _chief_has_saved(group.session, path):
                return None
            return _write_and_notify(write_alone, full, str(filepath), group, args, kwargs)

    return chief_writes


def _write_and_notify(
    write: Callable[..., Any], model: Any, path: str, group: Group, args: Any, kwargs: Any
) -> Any:
    notice = {"path": os.path.abspath(path)}
    try:
        return _write_then_rename(write, model, path, args, kwargs)
    except Exception as error:
        notice["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if group.topology.is_chief:
            group.session.notify(_NOTICE, json.dumps(notice))


def _write_together(
    write: Callable[..., Any], full: Any, path: str, group: Group, args: Any, kwargs: Any
) -> Any:
    """The chief writes the full model gathered from all workers; all learn the outcome."""
    result, error = None, None
    if full is not None:
        try:
            result = _write_then_rename(write, full, path, args, kwargs)
        except Exception as exception:
            error = exception
    report = {"path": os.path.abspath(path), "error": error and f"{type(error).__name__}: {error}"}
    chief_report = json.loads(group.exchange("saving", json.dumps(report))[0])
    if error is not None:
        raise error
    _check_written(chief_report)
    if chief_report["path"] != report["path"]:
        raise ValueError(
            "All workers must save a sharded model to the same path, which the chief writes. "
            f"Received: {report['path']!r}, and {chief_report['path']!r} on the chief. Pass the "
            "same path on all workers."
        )
    return result


def _check_written(notice: dict[str, Any]) -> None:
    if notice.get("error"):
        raise OSError(f"The chief could not write {notice['path']!r}: {notice['error']}")


def needs_gathering(model: Any) -> bool:
    """Whether the model or its optimizer is sharded, so that all workers take part in saving."""
    return in_stages(model) or has_sharded_optimizer(model)


class InStages:
    """Marker base class of models whose stages are held by different workers.

    A class, since a user's model may define any attribute.
    """

    def full_model(self) -> contextlib.AbstractContextManager[Any]:
        """The full model on the chief, None elsewhere; all workers call it."""
        raise NotImplementedError

    @property
    def holds_last_stage(self) -> bool:
        """Whether this worker computes the loss and the metrics."""
        raise NotImplementedError

    def held_variables(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """This worker's weights, and its optimizer's variables, named as in the full model."""
        raise NotImplementedError


def in_stages(model: Any) -> bool:
    """Whether the model is split into stages held by different workers."""
    return isinstance(model, InStages)


def _full_model(model: Any) -> contextlib.AbstractContextManager[Any]:
    """The model to write; for a sharded one the full model on the chief, None elsewhere."""
    if in_stages(model):
        return model.full_model()  # type: ignore[no-any-return]
    if has_sharded_optimizer(model):
        return with_full_optimizer(model)
    return contextlib.nullcontext(model)


_read: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()
"""How many of the chief's notices of its saves this worker has read, in each session."""


def _chief_has_saved(session: Session, path: str) -> bool:
    """Waits for the chief's next save; returns False if it was to another path."""
    read = _read.get(session, 0)
    texts = session.wait_notified(_NOTICE, read + 1)
    while path not in [notice["path"] for notice in map(json.loads, texts[read:])]:
        try:
            texts = session.wait_notified(_NOTICE, len(texts) + 1, _OTHER_PATH_SECONDS)
        except RendezvousError:
            _read[session] = len(texts)
            return False
    while True:
        notice = json.loads(texts[read])
        read += 1
        _read[session] = read
        if notice["path"] == path:
            _check_written(notice)
            return True


def _write_then_rename(
    write: Callable[..., Any], model: Any, path: str, args: Any, kwargs: Any
) -> Any:
    if "://" in path or path.endswith(".json"):
        return write(model, path, *args, **kwargs)  # Remote, or several shards.
    folder, name = os.path.split(path)
    unfinished = os.path.join(folder, f".{uuid.uuid4().hex[:8]}.{name}")
    try:
        result = write(model, unfinished, *args, **kwargs)
        if os.path.isdir(unfinished):
            if os.path.isdir(path):
                shutil.rmtree(path)
            os.rename(unfinished, path)
        else:
            os.replace(unfinished, path)
        return result
    finally:
        if os.path.isdir(unfinished):
            shutil.rmtree(unfinished)
        elif os.path.exists(unfinished):
            os.remove(unfinished)
