"""Saving when all workers run the same script: the chief writes, everyone finds the file.

The chief writes beside the path it was given and renames at the end, so that nobody ever reads
half a file, and tells the others. Their calls to save return when it has, so that what they load
next is there. One that was given a path of its own writes it, as the chief has saved elsewhere.
What the chief saves by itself waits for nobody.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import uuid
from collections.abc import Callable
from typing import Any

from tfdist.cluster import Session
from tfdist.errors import RendezvousError
from tfdist.internals.keras import Model, legacy_h5_format, saving_lib
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.strategies.group import Group
from tfdist.trainer.sharded_files import has_sharded_optimizer, with_whole_optimizer

_NOTICE = "saved"
_OTHER_PATH_SECONDS = 2.0


def install() -> None:
    """Replaces what writes model files."""
    saving_lib.save_model = _chief_writes(saving_lib.save_model)
    saving_lib.save_weights_only = _chief_writes(saving_lib.save_weights_only)
    legacy_h5_format.save_model_to_hdf5 = _chief_writes(legacy_h5_format.save_model_to_hdf5)
    Model.export = _chief_writes(Model.export)


def group_of(model: Any) -> Group | None:
    """The group of workers that a model is trained by; None where there is only one."""
    strategy = getattr(model, "_distribute_strategy", None)
    extended = getattr(strategy, "extended", None)
    if isinstance(extended, ReplicatedExtended) and extended.process_count > 1:
        return extended.group
    return None


def _chief_writes(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def chief_writes(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        group = group_of(model)
        with _in_one_piece(model) as whole:
            if group is None or not isinstance(filepath, (str, os.PathLike)):
                return write(whole, filepath, *args, **kwargs)
            path = os.path.abspath(filepath)
            if not group.topology.is_chief and _notices_of(group.session).chief_has_saved(path):
                return None
            if whole is None:
                raise ValueError(
                    "All workers save a model of which they hold parts to the same path, where "
                    f"the chief writes it. Received: {path!r}, and another one on the chief. "
                    "Pass the same."
                )
            result = _write_then_rename(write, whole, str(filepath), args, kwargs)
        if group.topology.is_chief:
            group.session.notify(_NOTICE, path)
        return result

    return chief_writes


def in_parts(model: Any) -> bool:
    """Whether workers hold parts of a model or its optimizer, so that all take part in saving."""
    return in_stages(model) or has_sharded_optimizer(model)


def in_stages(model: Any) -> bool:
    """Whether workers hold parts of a model."""
    return hasattr(model, "gathered")


def _in_one_piece(model: Any) -> contextlib.AbstractContextManager[Any]:
    """The model to be written; of one in parts the whole on the chief, and None elsewhere."""
    if in_stages(model):
        return model.gathered()  # type: ignore[no-any-return]
    if has_sharded_optimizer(model):
        return with_whole_optimizer(model)
    return contextlib.nullcontext(model)


class _Notices:
    """The chief's word of what it has saved, as another worker has read it so far."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._read = 0

    def chief_has_saved(self, path: str) -> bool:
        """Waits for the chief's next save; False where it was to another path."""
        texts = self._session.wait_notified(_NOTICE, self._read + 1)
        while path not in texts[self._read :]:
            try:
                texts = self._session.wait_notified(_NOTICE, len(texts) + 1, _OTHER_PATH_SECONDS)
            except RendezvousError:
                self._read = len(texts)
                return False
        self._read = texts.index(path, self._read) + 1
        return True


_notices: dict[int, _Notices] = {}


def _notices_of(session: Session) -> _Notices:
    return _notices.setdefault(id(session), _Notices(session))


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
