"""Saves models when all workers run the same script: only the chief writes the file.

If the state of the model is sharded, a save gathers it on the chief. When the file is loaded, each
worker reads the full state and keeps its own shard, so the number of workers may have changed since
the save.

The chief writes to a temporary file next to the path and renames it at the end, so that no worker
ever reads a partial file. Then it notifies the other workers. Their calls of `save` return only
after this notice, so that they can load the file immediately afterwards.

A worker may not see the chief's file, because it shares no disk with the chief or because it uses
another path. Such a worker writes the file itself. If the model is sharded, it receives a copy of
the chief's file instead.

If only the chief calls `save`, it does not wait for the other workers. Neither does the code that
creates variables during the save.
"""

import contextlib
import functools
import json
import os
import shutil
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.cluster import Notice, Session
from tfdist._src.group import Group
from tfdist._src.internals.keras import variables_of_archive
from tfdist._src.internals.variables import set_value_on_cpu
from tfdist._src.keras.patching import patch
from tfdist._src.log import logger
from tfdist._src.sharding import FullState, full_variables, sharded_by
from tfdist._src.strategy.extended import extended_if_ours, extended_of
from tfdist._src.strategy.variables import alone, is_alone
from tfdist.errors import PeerLostError, RendezvousError, UnsupportedError


def _install_sharded_files() -> None:
    """Replaces how optimizers load their state from files."""
    patch("BaseOptimizer.load_own_variables", _loading_full_state)
    patch("BaseOptimizer.set_weights", _loading_full_state)


def has_sharded_optimizer(model: Any) -> bool:
    """Whether a model's optimizer is sharded."""
    return sharded_by(getattr(model, "optimizer", None)) is not None


@contextlib.contextmanager
def with_full_optimizer(model: Any) -> Iterator[Any]:
    """Yields the model with an unsharded optimizer on the chief, and None on other workers.

    All workers must enter this context, because it gathers the state of the optimizer.
    """
    optimizer, extended = model.optimizer, extended_of(model.distribute_strategy)
    chief = extended.group.topology.is_chief
    state = FullState(optimizer)
    with extended.group.naming_lost_workers():
        state.gather(extended.workers, keep=chief)
    if not chief:
        yield None
        return
    for variable, own in zip(state.blanks, state.variables, strict=True):
        set_value_on_cpu(variable, tf.convert_to_tensor(own))
    # The attribute is set without Keras's tracking, which would add the new optimizer to the model.
    attributes = vars(model)
    attributes["optimizer"] = state.blank
    try:
        yield model
    finally:
        attributes["optimizer"] = optimizer


class _LoadTarget:
    """Stands in for a sharded optimizer while its state is loaded from a file.

    Its variables accept the full values of the unsharded state.
    """

    built = True

    def __init__(self, optimizer: Any) -> None:
        self.name = optimizer.name
        self.variables = self._variables = full_variables(optimizer)

    def _var_key(self, variable: Any) -> str:
        return str(variable.name)


def _loading_full_state(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_local(self: Any, values: Any) -> Any:
        return load(self if sharded_by(self) is None else _LoadTarget(self), values)

    return load_local


_NOTICE = "saved"
_OTHER_PATH_SECONDS = 2.0
_CHUNK_BYTES = 1 << 24
_ENDS_BYTES = 1 << 16
_PRECISION_SECONDS = 2


def install() -> None:
    """Replaces the functions that write model files, and how optimizers load their state."""
    _install_files()
    _install_sharded_files()


def _install_files() -> None:
    """Replaces the functions that write model files."""
    patch("saving_lib.save_model", _chief_writes)
    patch("saving_lib.save_weights_only", _chief_writes)
    patch("legacy_h5_format.save_model_to_hdf5", _chief_writes)
    patch("saving_lib.get_attr_skipset", _creating_alone)
    patch("Model.export", _chief_writes)
    patch("ExportArchive.write_out", _archive_written_by_chief)
    patch("tf.saved_model.save", _saved_model_written_by_chief)


def group_of(model: Any) -> Group | None:
    """Returns the group of workers that train a model; None if there is only one worker."""
    extended = extended_if_ours(getattr(model, "_distribute_strategy", None))
    if extended is not None and extended.process_count > 1:
        # Under a pipeline strategy, a model that is not a `PipelineModel` is the full model, which
        # exists only on the chief.
        return None if extended.in_stages and not is_pipeline_model(model) else extended.group
    return None


def awaits_admission(model: Any) -> bool:
    """Whether this process waits to be admitted to the job that trains a model."""
    extended = extended_if_ours(getattr(model, "_distribute_strategy", None))
    return extended is not None and extended.group.joiner is not None


def _creating_alone(read_names: Callable[..., Any]) -> Callable[..., Any]:
    # Keras creates an instance of a class to find its attributes. An optimizer instance creates
    # variables, and all workers must create variables in the scope together. However, a single
    # worker may load weights, so it creates the variables without the other workers.
    @functools.wraps(read_names)
    def create_alone(obj_type: Any) -> Any:
        with alone():
            return read_names(obj_type)

    return create_alone


def _chief_writes(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def chief_writes(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if awaits_admission(model):
            logger.warning(
                f"{filepath} is not written: this process waits to be admitted to the job."
            )
            return None
        group, together = group_of(model), needs_gathering(model)
        with _full_model(model) as full:

            def write_to(path: Any) -> Any:
                with alone():
                    return write(full, path, *args, **kwargs)

            if group is None or not isinstance(filepath, (str, os.PathLike)):
                return write_to(filepath)
            if together:
                return _write_together(write_to, full is not None, os.fspath(filepath), model)
            return _write(write_to, os.fspath(filepath), _step_of(model), group)

    return chief_writes


def _saved_model_written_by_chief(save: Callable[..., None]) -> Callable[..., None]:
    of_model = _chief_writes(save)

    @functools.wraps(save)
    def save_model(obj: Any, export_dir: Any, signatures: Any = None, options: Any = None) -> None:
        (save if is_alone() else of_model)(obj, export_dir, signatures, options)

    return save_model


def _archive_written_by_chief(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def write_out(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        def write_to(path: Any) -> Any:
            with alone():
                return write(self, path, *args, **kwargs)

        variables = () if is_alone() else variables_of_archive(self)
        group = next(filter(None, map(_group_of_variable, variables)), None)
        if group is None or not isinstance(filepath, (str, os.PathLike)):
            return write_to(filepath)
        return _write(write_to, os.fspath(filepath), 0, group)

    return write_out


def _group_of_variable(variable: Any) -> Group | None:
    extended = extended_if_ours(getattr(variable, "_distribute_strategy", None))
    if extended is None or extended.process_count == 1:
        return None
    if extended.in_stages:
        raise UnsupportedError(
            "An ExportArchive cannot contain a model whose stages are on several workers. "
            f"Received: an endpoint that uses {variable.name!r}. Call the model's export method."
        )
    return extended.group


def _write(write: Callable[[str], Any], path: str, step: int, group: Group) -> Any:
    """Writes a file on the chief, and on each worker that does not find the chief's file.

    Args:
        write: writes the file to a path.
        path: the path given by the user.
        step: the number of updates of the model so far.
        group: the workers.
    """
    if group.topology.is_chief:
        return _write_and_notify(write, path, step, group.session)
    found = _chief_notice(group.session, path, step)
    if found is None:
        return _write_then_rename(write, path)
    notice, since = found
    if notice["error"]:
        raise OSError(f"The chief could not write {notice['path']!r}: {notice['error']}")
    if _has_file(path, notice, group):
        return None
    return _write_then_rename(write, path, since)


def _write_and_notify(write: Callable[[str], Any], path: str, step: int, session: Session) -> Any:
    notice = {"given": path, "path": os.path.abspath(path), "step": step, "error": "", "mark": None}
    try:
        result = _write_then_rename(write, path)
        notice["mark"] = _mark(path)
        return result
    except Exception as error:
        notice["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        session.notify(_NOTICE, json.dumps(notice))


def _write_together(write: Callable[[str], Any], has_full: bool, path: str, model: Any) -> Any:
    """Writes the full model on the chief, and tells all workers whether this has succeeded.

    All workers must call this function. A worker that does not find the file receives a copy.

    Args:
        write: writes the full model to a path.
        has_full: whether this worker holds the full model, which only the chief does.
        path: the path given by the user.
        model: the sharded model.
    """
    extended = extended_of(model.distribute_strategy)
    group = extended.group
    result, error = None, None
    notice: dict[str, Any] = {"path": os.path.abspath(path), "error": "", "files": []}
    if has_full:
        try:
            result = _write_then_rename(write, path)
            notice["mark"] = _mark(path)
            notice["files"] = [] if _is_remote(path) else _files(path)
        except Exception as exception:
            error = exception
            notice["error"] = f"{type(error).__name__}: {error}"
    notice = json.loads(group.exchange("saving", json.dumps(notice))[0])
    if error is not None:
        raise error
    if notice["error"]:
        raise OSError(f"The chief could not write {notice['path']!r}: {notice['error']}")
    has_file = has_full or _has_file(path, notice, group)
    if set(group.exchange("saved", str(has_file))) != {"True"}:
        source = path if has_full else None
        everyone = group.native() if extended.in_stages else extended.workers
        with group.naming_lost_workers():
            send = functools.partial(_send_files, notice["files"], source, everyone)
            if has_file:
                send(None)
            else:
                _write_then_rename(send, path)
    return result


def _has_file(path: str, notice: dict[str, Any], group: Group) -> bool:
    """Whether this worker sees the chief's file, or only the chief may write files."""
    if os.path.abspath(path) != notice["path"]:
        return False
    return group.options.save == "chief" or _sees(path, notice["mark"])


def _send_files(
    files: list[tuple[str, int]], source: str | None, workers: Any, path: str | None
) -> None:
    """Sends the chief's files to all workers by broadcasts.

    Args:
        files: the names and sizes of the files, from `_files`.
        source: the path of the saved files on the chief; None on other workers.
        workers: the communicator of all workers.
        path: the path to write to; None on workers that already have the files.
    """
    # The error is raised only at the end, because the other workers wait for this worker in each
    # broadcast.
    failure: OSError | None = None
    for name, size in files:
        with contextlib.ExitStack() as opened:
            read, write = None, None
            if source is not None:
                read = opened.enter_context(open(_inside(source, name), "rb")).read
            elif path is not None and failure is None:
                try:
                    os.makedirs(os.path.dirname(_inside(path, name)), exist_ok=True)
                    write = opened.enter_context(open(_inside(path, name), "wb", 0)).write
                except OSError as error:
                    failure = error
            for at in range(0, size, _CHUNK_BYTES):
                count = min(_CHUNK_BYTES, size - at)
                chunk = np.zeros(count, np.uint8)
                if read is not None:
                    chunk = np.frombuffer(read(count), np.uint8)
                sent = workers.broadcast(tf.constant(chunk))
                if write is not None and failure is None:
                    try:
                        write(sent.numpy().tobytes())
                    except OSError as error:
                        failure = error
    if failure is not None:
        raise failure


def needs_gathering(model: Any) -> bool:
    """Whether the model or its optimizer is sharded, so that all workers must save together."""
    return is_pipeline_model(model) or has_sharded_optimizer(model)


class PipelineModelBase:
    """Base class that marks models with stages on different workers.

    An attribute could not mark these models, because a user's model may define any attribute.
    """

    def full_model(self) -> contextlib.AbstractContextManager[Any]:
        """Yields the full model on the chief, and None on other workers.

        All workers must enter this context.
        """
        raise NotImplementedError

    @property
    def holds_last_stage(self) -> bool:
        """Whether this worker holds the last stage, which computes the loss and the metrics."""
        raise NotImplementedError

    def held_variables(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns this worker's weights and optimizer variables, by names in the full model."""
        raise NotImplementedError


def is_pipeline_model(model: Any) -> bool:
    """Whether the model is split into stages held by different workers."""
    return isinstance(model, PipelineModelBase)


def _full_model(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Yields the model to write. If it is sharded, workers other than the chief get None."""
    if is_pipeline_model(model):
        return model.full_model()  # type: ignore[no-any-return]
    if has_sharded_optimizer(model):
        return with_full_optimizer(model)
    return contextlib.nullcontext(model)


_read: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()
"""For each session, the number of the chief's save notices that this worker has read."""


def _chief_notice(session: Session, path: str, step: int) -> tuple[dict[str, Any], int] | None:
    """Waits for the chief's notice of a save; returns the notice and its arrival time.

    Returns None if the chief has saved another file instead, or has left the job.
    """
    read, seconds = _read.get(session, 0), None
    notices: list[Notice] = []
    while True:
        try:
            notices = session.wait_notified(_NOTICE, max(read, len(notices)) + 1, seconds)
        except RendezvousError:
            if seconds is None:
                raise
            break
        except PeerLostError:
            if not session.chief_has_left:
                raise
            break
        for number, received in enumerate(notices[read:], read + 1):
            notice = json.loads(received.text)
            is_same = notice["path"] == os.path.abspath(path) or notice["given"] == path
            if is_same and notice["step"] == step:
                _read[session] = number
                return notice, received.received_ns
        seconds = _OTHER_PATH_SECONDS
    # One notice is skipped. The other unread notices belong to saves that this worker has not
    # reached yet.
    _read[session] = min(read + 1, max(read, len(notices)))
    return None


def _step_of(model: Any) -> int:
    """Returns the number of updates of a model, which distinguishes saves to the same path."""
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    return 0 if iterations is None else int(iterations.numpy())


def _is_remote(path: str) -> bool:
    """Whether a path is in an object store, which all workers see."""
    return "://" in path


def _inside(path: str, name: str) -> str:
    return os.path.normpath(os.path.join(os.path.abspath(path), name))


def _files(path: str) -> list[tuple[str, int]]:
    """Returns the names and sizes of the files that a save to a path has written.

    The names are relative to the path. "." is the file at the path itself. The other files are in
    the folder at the path, or next to the path if it is an index of several files.
    """
    names = ["."]
    if os.path.isdir(path):
        names = [
            os.path.relpath(os.path.join(folder, file), path)
            for folder, _, files in os.walk(path)
            for file in files
        ]
    elif path.endswith(".json"):  # The index lists the other files.
        with open(path, encoding="utf-8") as index:
            names += {f"../{file}" for file in json.load(index)["weight_map"].values()}
    return [(name, os.path.getsize(_inside(path, name))) for name in sorted(names)]


def _mark(path: str) -> list[int]:
    """Returns a fingerprint of saved files: the path's modification time and a checksum.

    The checksum covers only the beginning and the end of each file, because archives, HDF5 and
    TensorFlow's formats store their tables there. The result is [] for paths that all workers see.
    """
    if _is_remote(path):
        return []
    checksum = 0
    for name, size in _files(path):
        with open(_inside(path, name), "rb") as file:
            head = file.read(_ENDS_BYTES)
            file.seek(max(0, size - _ENDS_BYTES))
            for part in (f"{name} {size}".encode(), head, file.read(_ENDS_BYTES)):
                checksum = zlib.crc32(part, checksum)
    return [int(os.stat(path).st_mtime), checksum]


def _sees(path: str, mark: list[int]) -> bool:
    """Whether a path on this worker holds the files that another worker has written.

    The comparison allows for file systems that store modification times with different precision.
    """
    if not mark:
        return True
    try:
        os.listdir(os.path.dirname(os.path.abspath(path)))  # Makes NFS query the server.
        time, checksum = _mark(path)
    except (OSError, ValueError, KeyError):
        return False
    return checksum == mark[1] and abs(time - mark[0]) <= _PRECISION_SECONDS


def _write_then_rename(write: Callable[[str], Any], path: str, since: int | None = None) -> Any:
    """Writes to a temporary path, and then moves the result to the given path.

    Args:
        write: writes a file or folder to a path.
        path: the given path.
        since: a time in nanoseconds, as returned by `time.time_ns()`. If another worker of this
            host has written to the path since then, the path already has the same contents, and
            they are kept.
    """
    if _is_remote(path) or path.endswith(".json"):
        return write(path)  # It is remote, or an index of several files.
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{uuid.uuid4().hex[:8]}.{{}}{name}")
    unfinished, former = beside.format(""), beside.format("former.")
    try:
        result = write(unfinished)
        if since is not None and os.path.exists(path) and os.stat(path).st_mtime_ns >= since:
            return result
        if os.path.isdir(unfinished):
            if os.path.isdir(path):
                os.rename(path, former)
            os.rename(unfinished, path)
        else:
            os.replace(unfinished, path)
        return result
    finally:
        for left in (unfinished, former):
            if os.path.isdir(left):
                shutil.rmtree(left)
            elif os.path.exists(left):
                os.remove(left)
