"""Workers of one process, as threads, that run the parts of a partitioned program."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.global_view.analysis import Analysis, Value, dims_of
from tfdist.global_view.layout import SETTLED_SUM, WHOLE, Dim, Symbol, rows
from tfdist.global_view.partition import Lane, Partition, Share

_REDUCE = {
    "sum": lambda a: np.sum(a, axis=0, dtype=a.dtype),
    "product": lambda a: np.prod(a, axis=0, dtype=a.dtype),
    "max": lambda a: np.max(a, axis=0),
    "min": lambda a: np.min(a, axis=0),
    "all": lambda a: np.all(a, axis=0),
    "any": lambda a: np.any(a, axis=0),
}


# A thread for each worker that waits for the others.
with contextlib.suppress(RuntimeError):
    tf.config.threading.set_inter_op_parallelism_threads(16)


class Meeting:
    """Where the workers meet to communicate."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[Any] = [None] * size
        self.bytes = {"reduced": 0, "gathered": 0}

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait()
        result = list(self.given)
        self.barrier.wait()
        return result


class Simulated:
    """The communication of one worker."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def reduce(self, tensors, hows):
        def run(*arrays):
            everyone = self.meeting.exchange(self.rank, ("reduce", tuple(hows), arrays))
            assert len({(kind, names) for kind, names, _ in everyone}) == 1, everyone
            results = []
            for i, how in enumerate(hows):
                parts = np.stack([a[i] for _, _, a in everyone])
                results.append(np.asarray(_REDUCE[how](parts), parts.dtype))
            self.meeting.bytes["reduced"] += sum(a.nbytes for a in arrays)
            return results

        return self._call(run, tensors, [t.shape for t in tensors])

    def gather(self, tensors):
        def run(*arrays):
            everyone = self.meeting.exchange(self.rank, ("gather", None, arrays))
            assert {kind for kind, _, _ in everyone} == {"gather"}
            self.meeting.bytes["gathered"] += sum(a.nbytes for a in arrays)
            return [np.concatenate([a[i] for _, _, a in everyone]) for i in range(len(arrays))]

        return self._call(run, tensors, [[None, *t.shape[1:]] for t in tensors])

    def _call(self, run, tensors, shapes):
        results = tf.numpy_function(run, tensors, [t.dtype for t in tensors])
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return results


def split(total: int, workers: int) -> list[int]:
    """Nearly equal shares."""
    return [total // workers + (r < total % workers) for r in range(workers)]


def specs(inputs, batch: int | None):
    return [tf.TensorSpec([batch, *np.shape(x)[1:]], np.asarray(x).dtype) for x in inputs]


def trace(program, inputs, *, static: bool = False):
    """The program's graph for the whole batch."""
    batch = len(inputs[0]) if static else None
    function = tf.function(program, autograph=False)
    return function.get_concrete_function(*specs(inputs, batch))


def analyze(concrete, inputs, *, static: bool = False, partial=()) -> Analysis:
    batch = Symbol(size=len(inputs[0]) if static else None)
    graph = concrete.graph
    values = []
    captured = {id(inner) for _, inner in graph.captures}
    held = {id(inner) for outer, inner in graph.captures if any(outer is v.handle for v in partial)}
    for tensor in graph.inputs:
        if id(tensor) in captured:
            layout = SETTLED_SUM if id(tensor) in held else WHOLE
            values.append(Value(layout, dims_of(tensor)))
        else:
            dims = (Dim(1, (batch,)), *(dims_of(tensor) or ())[1:])
            values.append(Value(rows(), dims))
    return Analysis(graph, values, batch)


def run(program, inputs, shares, *, static: bool = False, partial=()):
    """Runs a program on workers.

    Args:
        program: a function of tensors with the rows of a batch as their first axis.
        inputs: arrays of the whole batch.
        shares: each worker's number of rows.
        partial: variables of which each worker holds a part; one list for each worker.

    Returns:
        Each worker's results, the bytes that were communicated, and the analysis.
    """
    inputs = [np.asarray(x) for x in inputs]
    concrete = trace(program, inputs, static=static)
    analysis = analyze(concrete, inputs, static=static, partial=partial)
    meeting = Meeting(len(shares))
    results: list[Any] = [None] * len(shares)
    total = sum(shares)

    def work(rank: int) -> None:
        try:
            results[rank] = _work(rank)
        except BaseException as error:
            results[rank] = error
            meeting.barrier.abort()

    def _work(rank: int):
        first = sum(shares[:rank])
        own = shares[rank]
        parts = [x[first : first + own] if own else x[:1] for x in inputs]

        def step(total, *parts):
            share = Share(
                rows=tf.shape(parts[0])[0],
                total=total,
                first=tf.constant(first if own else 0),
                counts=tf.constant(own > 0),
                leads=tf.constant(own > 0 and first == 0),
                is_first=tf.constant(rank == 0),
            )
            lane = Lane(share, Simulated(meeting, rank))
            values = list(parts)
            values += [outer for outer, _ in concrete.graph.captures]
            partition = Partition(analysis, lane)
            return partition.add(values, [WHOLE] * len(concrete.graph.outputs))

        given = [tf.TensorSpec([None, *p.shape[1:]], p.dtype) for p in parts]
        function = tf.function(step, autograph=False, input_signature=[tf.TensorSpec([], tf.int32), *given])
        return [r.numpy() for r in function(tf.constant(total), *map(tf.constant, parts))]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [r for r in results if isinstance(r, BaseException)]
    if errors:
        raise min(errors, key=lambda error: "BrokenBarrierError" in str(error))
    return results, meeting.bytes, analysis


def check(program, inputs, shares, *, static: bool = False, tolerance: float = 1e-5, equal=True):
    """Compares a partitioned program with the whole one; returns the bytes communicated."""
    inputs = [np.asarray(x) for x in inputs]
    expected = [r.numpy() for r in tf.nest.flatten(trace(program, inputs)(*map(tf.constant, inputs)))]
    results, sent, analysis = run(program, inputs, shares, static=static)
    for rank, result in enumerate(results):
        for i, (actual, wanted) in enumerate(zip(result, expected, strict=True)):
            assert actual.shape == wanted.shape, (rank, i, actual.shape, wanted.shape)
            if wanted.dtype.kind in "SOUb":
                assert np.array_equal(actual, wanted), (rank, i)
            else:
                np.testing.assert_allclose(
                    actual, wanted, rtol=tolerance, atol=tolerance, err_msg=f"rank {rank}, {i}"
                )
            if equal:
                assert np.array_equal(actual, results[0][i], equal_nan=wanted.dtype.kind in "fc")
    return sent, analysis


def gathers(analysis) -> list[str]:
    """The types of the operations that gather rows, at any depth."""
    found = []
    for op, decision in analysis.decisions.items():
        for tensor, layout in zip(op.inputs, decision.inputs, strict=True):
            own = analysis.value_of(tensor).layout
            if own.kind == "rows" and layout is not None and layout != own:
                found.append(op.type)
        for part in decision.parts:
            found += gathers(part)
    return found
