"""Propagates a failed step to the other workers, which then raise an error that names the cause.

This module also compares the order of collectives on all workers. A loop over a `set` could
otherwise mix up two sums with the same shape and source line. Steps of `fit` are compared more
strictly, by `keras.fit.compared_state`.
"""

import contextlib
import os
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist._src.cluster.session.order_checks import CollectiveInput, encode
from tfdist._src.comm import tokens
from tfdist._src.comm.cause import FAILED, Cause
from tfdist._src.global_view.explain import Fingerprints, describe
from tfdist._src.group import Group, cause, joined_group
from tfdist._src.internals.tensorflow import (
    concrete_functions,
    functions_operations,
    on_function_call,
)
from tfdist.errors import ProgramMismatchError

_seen: weakref.WeakSet[Any] = weakref.WeakSet()
_traces: Counter[str] = Counter()


def report_traces(group: Group, function: Any) -> None:
    """Reports the collectives of a function's new traces to rank 0, without waiting for a reply.

    Args:
        group: the workers.
        function: a `tf.function`.
    """
    if group.topology.size == 1:
        return
    for concrete in concrete_functions(function):
        graph = concrete.graph
        if graph in _seen:
            continue
        _seen.add(graph)
        passed = _passed(graph, group)
        if len(passed) > 1:
            name = _name(function)
            _traces[name] += 1
            count = f", trace {_traces[name]}" if _traces[name] > 1 else ""
            group.session.report_order(f"{name}{count}", encode(passed))


def _passed(graph: Any, group: Group) -> list[CollectiveInput]:
    """Returns the values that a graph passes to collectives, in order.

    The list is empty if the graph has fewer than two collectives, or is too large for a protobuf
    message.
    """
    ordering = {inner.op.name for outer, inner in graph.captures if tokens.is_token(outer)}
    operations = [
        op
        for op in graph.get_operations()
        if op.type.startswith("Collective") or any(t.op.name in ordering for t in op.inputs)
    ]
    if len(operations) < 2:
        return []
    try:
        fingerprints = Fingerprints(graph, _names_of_captures(graph, ordering))
    except ValueError:
        return []
    found = []
    for op in operations:
        given = [t for t in op.inputs if t.dtype != tf.resource and not _is_constant(t)]
        if given:
            found.append(CollectiveInput(fingerprints.of(op), describe(given[0])))
    return found


# If a function refers to a value with more bytes, only the type and shape are compared.
_COMPARED_BYTES = 2**16


def _names_of_captures(graph: Any, ordering: set[str]) -> dict[str, str]:
    """Returns names for a graph's captures that do not depend on the order of the captures."""
    variables = {id(variable.handle): variable.name for variable in graph.variables}
    names = {}
    for outer, inner in graph.captures:
        name = f"{inner.dtype.name} {inner.shape} {variables.get(id(outer), '')}"
        if inner.op.name in ordering:
            name = "order"
        elif hasattr(outer, "numpy") and outer.dtype not in (tf.resource, tf.variant):
            value = outer.numpy()
            if 0 < value.nbytes <= _COMPARED_BYTES and not value.dtype.hasobject:
                name = f"{name} {zlib.crc32(value.tobytes())}"
        names[inner.op.name] = name
    return names


def _is_constant(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed only from constants, such as zeros."""
    pending, seen = [tensor.op], set()
    while pending:
        op = pending.pop()
        if op.type in ("Placeholder", "ReadVariableOp") or op.op_def.is_stateful:
            return False
        if op not in seen:
            seen.add(op)
            pending += [t.op for t in op.inputs]
    return True


def _name(function: Any) -> str:
    """Returns the name of a `tf.function`, and the line where the function is defined."""
    python_function = function.python_function
    code = getattr(python_function, "__code__", None)
    name = getattr(python_function, "__qualname__", type(python_function).__name__)
    if code is None:
        return str(name)
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


# No failures of a worker: the end of the data, and errors that all workers raise together.
_NO_FAILURES = (StopIteration, tf.errors.OutOfRangeError, ProgramMismatchError)
_COLLECTIVES = ("Tfdist", "Collective")
_listening = False


@contextlib.contextmanager
def running_step(group: Group, *, eager: bool) -> Iterator[None]:
    """Runs a step of this worker and, if it raises, reports the cause to the waiting workers.

    Args:
        group: the workers.
        eager: whether the step runs eagerly. If so, even an error that no operation has raised is
            an error of the running step, because the step is not traced.

    Raises:
        tf.errors.UnavailableError: another worker was lost, or the step of another worker failed.
            The message names that worker.
    """
    if group.in_step:
        yield
        return
    began_ns = time.monotonic_ns()
    try:
        with group.naming_lost_workers():
            yield
    except (Exception, KeyboardInterrupt) as error:
        _report(group, error, began_ns, eager=eager)
        raise


def listen() -> None:
    """Installs a hook that runs after each call of a user-defined `tf.function`; idempotent."""
    global _listening
    if not _listening:
        _listening = True
        on_function_call(lambda: (tokens.uses(), time.monotonic_ns()), _function_called)


def _function_called(function: Any, error: BaseException | None, before: tuple[int, int]) -> None:
    uses, began_ns = before
    used = tokens.uses() > uses
    if error is None and not used:
        return
    group = joined_group()
    if group is None or group.in_step:
        return
    if error is None:
        report_traces(group, function)
    # After an error, the trace may be incomplete. So the collectives that the call has used count
    # as well.
    elif used or any(name.startswith(_COLLECTIVES) for name in functions_operations(function)):
        _report(group, error, began_ns, eager=False)


def _report(group: Group, error: BaseException, began_ns: int, *, eager: bool) -> None:
    if isinstance(error, _NO_FAILURES) or group.topology.size == 1:
        return
    known = group.cause_of(error, began_ns)
    if known is not None:
        # Forward the cause to workers that have no communicator in common with the failed worker.
        group.fail(known)
        return
    why, me = cause(error).rstrip("."), str(group.topology.me)
    group.fail(Cause(f"{me} failed: {why}.", FAILED, me))
    if eager or isinstance(error, tf.errors.OpError):
        group.end(why)
