"""What each collective returns or raises for the same arguments, on any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import collective

# What this rank gives: other values on each.
_ROWS = 6


def _own(rank: int, *shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype="float32").reshape(shape) + 10 * rank


def _given(*shape: int, dtype: Any = tf.float32) -> tf.Tensor:
    return tf.cast(_own(collective.communicator().rank, *shape), dtype)


def _all(size: int, *shape: int) -> np.ndarray:
    return np.stack([_own(rank, *shape) for rank in range(size)])


# A call, and what it returns on a rank of a group of a size.
RESULTS: dict[str, tuple[Callable[[], Any], Callable[[int, int], Any]]] = {
    **{
        f"all_reduce {op}": (
            lambda op=op: collective.all_reduce(_given(2), op),
            lambda rank, size, reduce=reduce: reduce(_all(size, 2), axis=0),
        )
        for op, reduce in (
            ("sum", np.sum),
            ("mean", np.mean),
            ("min", np.min),
            ("max", np.max),
            ("product", np.prod),
        )
    },
    "a nest": (
        lambda: collective.all_reduce({"a": _given(2), "b": [1, True]}),
        lambda rank, size: {"a": _all(size, 2).sum(0), "b": [size, True]},
    ),
    "an empty nest": (lambda: collective.all_reduce({}), lambda rank, size: {}),
    "slices": (
        lambda: collective.all_reduce(tf.IndexedSlices(_given(1, 2), [0], [2, 2])),
        lambda rank, size: np.pad(_all(size, 1, 2).sum(0), [[0, 1], [0, 0]]),
    ),
    "reduce_scatter": (
        lambda: collective.reduce_scatter(_given(_ROWS, 2)),
        lambda rank, size: np.split(_all(size, _ROWS, 2).sum(0), size)[rank],
    ),
    "all_gather": (
        lambda: collective.all_gather(_given(2, 2)),
        lambda rank, size: np.concatenate(_all(size, 2, 2)),
    ),
    "all_gather of no rows": (
        lambda: collective.all_gather(_given(0, 2)),
        lambda rank, size: np.zeros([0, 2]),
    ),
    "broadcast": (lambda: collective.broadcast(_given(2)), lambda rank, size: _own(0, 2)),
    "broadcast from the last": (
        lambda: collective.broadcast(_given(2), collective.communicator().size - 1),
        lambda rank, size: _own(size - 1, 2),
    ),
    "all_to_all": (
        lambda: collective.all_to_all(_given(_ROWS))[0],
        lambda rank, size: np.concatenate(
            [np.split(_own(r, _ROWS), size)[rank] for r in range(size)]
        ),
    ),
    "all_to_all of rows": (
        lambda: collective.all_to_all(
            _given(_ROWS), [_ROWS, *[0] * (collective.communicator().size - 1)]
        )[1],
        lambda rank, size: [0 if rank else _ROWS] * size,
    ),
    "barrier": (lambda: collective.barrier() and None, lambda rank, size: None),
}

# Calls that are refused.
ERRORS: dict[str, Callable[[], Any]] = {
    **{
        f"{name} of {dtype.name}": lambda call=call, dtype=dtype: call(tf.zeros([_ROWS], dtype))
        for name, call in (
            ("all_reduce", collective.all_reduce),
            ("reduce_scatter", collective.reduce_scatter),
            ("all_gather", collective.all_gather),
            ("broadcast", collective.broadcast),
            ("all_to_all", collective.all_to_all),
            ("send", lambda value: collective.send(value, 9)),
            ("receive", lambda value: collective.receive([1], value.dtype, 9)),
        )
        for dtype in (tf.string, tf.complex64, tf.uint16)
    },
    **{
        f"{name} of a scalar": lambda call=call: call(tf.constant(1.0))
        for name, call in (
            ("reduce_scatter", collective.reduce_scatter),
            ("all_gather", collective.all_gather),
            ("all_to_all", collective.all_to_all),
        )
    },
    **{
        f"{name} of {value!r}": lambda call=call, value=value: call(value)
        for name, call in (("all_reduce", collective.all_reduce), ("gather", collective.all_gather))
        for value in (None, object)
    },
    "mean of integers": lambda: collective.all_reduce(1, "mean"),
    "mean of booleans": lambda: collective.reduce_scatter(tf.zeros([_ROWS], tf.bool), "mean"),
    "unknown operation": lambda: collective.all_reduce(1.0, "average"),
    "unknown operation of shards": lambda: collective.reduce_scatter([1.0] * _ROWS, "average"),
    "root of -1": lambda: collective.broadcast(1.0, -1),
    "root of 9": lambda: collective.broadcast(1.0, 9),
    "root between": lambda: collective.broadcast(1.0, 0.5),
    "too few rows": lambda: collective.all_to_all(
        _given(_ROWS), [1] * collective.communicator().size
    ),
    "rows of others": lambda: collective.all_to_all(_given(_ROWS), [1] * 9),
    "negative rows": lambda: collective.all_to_all(
        _given(_ROWS), [-1] * collective.communicator().size
    ),
    "send to itself": lambda: collective.send(1.0, collective.communicator().rank),
    "send to nobody": lambda: collective.send(1.0, 9),
    "receive from nobody": lambda: collective.receive([1], tf.float32, 9),
    "unknown group": lambda: collective.all_reduce(1.0, communicator="nobody"),
    "barrier of an unknown group": lambda: collective.barrier(communicator="nobody"),
}


def _handle() -> list[Any]:
    """What a handle on a group does, which no function can trace."""
    group = collective.communicator()
    size = group.size
    part = group.split("part", list(range(size)))
    found = [
        len(group.hosts),
        len(group.links()),
        group.place()[1],
        part.size,
        part.rank,
        collective.all_reduce(1.0, communicator="part").numpy(),
        collective.statistics("part").collectives >= 0,
        part.traffic().collectives >= 0,
        group.split("of nobody", []) is None,
    ]
    for members, name in (
        (list(range(size)), "part"),
        ([9], "another"),
        ([0] * (size + 1), "more"),
    ):
        found.append(_said(lambda members=members, name=name: group.split(name, members)))
    found.append(_said(lambda: group.split("session", [0])))
    part.close()
    part.close()
    found.append(_said(lambda: collective.barrier(communicator="part")))
    part = group.split("part", list(range(size)))
    part.abort("enough")
    found.append(_said(lambda: collective.all_reduce(1.0, communicator="part")))
    part.close()
    return found


def _said(call: Callable[[], Any]) -> str:
    """An error without what depends on the number of ranks."""
    try:
        return f"no error: {call()}"
    except Exception as error:
        text = str(error)
        text = re.sub(r"\{\{function_node \S+\}\} | \[Op:\w+\] name:.*|Detected in.*", "", text)
        text = re.sub(r"(this process|worker \d+ \(\S+?\)):? ?(?=mesh|already)", "", text)
        text = re.sub(r"assertion failed: |[\[\]',\"\\]", "", text.split("\n")[0])
        return f"{type(error).__name__}: {re.sub(r'(-?[0-9]+ ?)+', 'N ', text).strip()}"


def run(strategy: Any, traced: bool) -> tuple[int, int, dict[str, Any], dict[str, str], list[Any]]:
    """The rank, the size, all results, all errors, and what a handle does."""
    group = collective.communicator()

    def called(call: Callable[[], Any]) -> Any:
        return tf.function(call, autograph=False)() if traced else call()

    results = {
        name: tf.nest.map_structure(_array, called(call)) for name, (call, _) in RESULTS.items()
    }
    errors = {name: _said(lambda call=call: called(call)) for name, call in ERRORS.items()}
    return group.rank, group.size, results, errors, [] if traced else _handle()


def _array(value: Any) -> Any:
    return value if value is None else np.asarray(value)
