"""Workers of one process, as threads, that run the parts of a partitioned program."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.global_view.analysis import Analysis
from tfdist._src.global_view.decision import Value, dims_of
from tfdist._src.global_view.layout import WHOLE, ZEROED_SUM, Dim, Symbol, rows
from tfdist._src.global_view.partition import Partition, WorkerEmitter
from tfdist._src.global_view.resharding import RowShare

_REDUCE = {
    "sum": lambda a: np.sum(a, axis=0, dtype=a.dtype),
    "product": lambda a: np.prod(a, axis=0, dtype=a.dtype),
    "max": lambda a: np.max(a, axis=0),
    "min": lambda a: np.min(a, axis=0),
    "all": lambda a: np.all(a, axis=0),
    "any": lambda a: np.any(a, axis=0),
    "stack": np.concatenate,
}


# A thread for each worker, since workers wait for each other. Setting this after TensorFlow has
# started is an error, so no test module may create tensors when it is imported.
tf.config.threading.set_inter_op_parallelism_threads(16)


class Meeting:
    """Exchanges values between the workers, and counts the bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[Any] = [None] * size
        self.bytes = {"reduced": 0, "gathered": 0, "scattered": 0}
        self.calls: list[str] = []  # The calls of the first worker.

    def exchange(self, rank: int, value: Any) -> list[Any]:
        if rank == 0:
            self.calls.append(value[0])
        self.given[rank] = value
        self.barrier.wait()
        result = list(self.given)
        self.barrier.wait()
        return result


class Simulated:
    """The communication of one worker."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank
        self.share: Any = None  # The worker's rows.
        self.turn = tf.Variable(0)  # Orders the calls, as a communicator does.

    def reduce(self, tensors, reductions):
        def run(*arrays):
            everyone = self.meeting.exchange(self.rank, ("reduce", tuple(reductions), arrays))
            assert len({(kind, names) for kind, names, _ in everyone}) == 1, everyone
            results = []
            for i, reduction in enumerate(reductions):
                parts = np.stack([a[i] for _, _, a in everyone])
                results.append(np.asarray(_REDUCE[reduction](parts), parts.dtype))
            self.meeting.bytes["reduced"] += sum(a.nbytes for a in arrays)
            return results

        return self._call(run, tensors, [t.shape for t in tensors])

    def gather(self, tensors):
        def run(*arrays):
            everyone = self.meeting.exchange(self.rank, ("gather", None, arrays))
            assert {kind for kind, _, _ in everyone} == {"gather"}
            self.meeting.bytes["gathered"] += sum(a.nbytes for a in arrays)
            return [np.concatenate([a[i] for _, _, a in everyone]) for i in range(len(arrays))]

        shapes = [t.shape if t.shape.rank is None else [None, *t.shape[1:]] for t in tensors]
        return self._call(run, tensors, shapes)

    scatters = True

    def scatter(self, tensors):
        def run(first, rows, *arrays):
            everyone = self.meeting.exchange(self.rank, ("scatter", None, arrays))
            assert {kind for kind, _, _ in everyone} == {"scatter"}
            self.meeting.bytes["scattered"] += sum(a.nbytes for a in arrays)
            sums = [
                _REDUCE["sum"](np.stack([a[i] for _, _, a in everyone])) for i in range(len(arrays))
            ]
            return [total[first : first + rows] for total in sums]

        shapes = [[None, *t.shape[1:]] for t in tensors]
        return self._call(run, tensors, shapes, [self.share.first, self.share.rows])

    def awaits_rows(self, values):
        pass

    def begin(self):
        pass

    def _call(self, run, tensors, shapes, others=()):
        with tf.control_dependencies([self.turn.assign_add(1)]):
            results = tf.numpy_function(run, [*others, *tensors], [t.dtype for t in tensors])
        with tf.control_dependencies(results):
            self.turn.assign_add(1)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return results


def split(total: int, workers: int) -> list[int]:
    """Returns nearly equal shares of a number of rows."""
    return [total // workers + (r < total % workers) for r in range(workers)]


def specs(inputs, batch: int | None):
    return [tf.TensorSpec([batch, *np.shape(x)[1:]], np.asarray(x).dtype) for x in inputs]


def trace(program, inputs, *, static: bool = False):
    """Traces a program for the whole batch."""
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
            layout = ZEROED_SUM if id(tensor) in held else WHOLE
            values.append(Value(layout, dims_of(tensor)))
        else:
            dims = (Dim(1, (batch,)), *(dims_of(tensor) or ())[1:])
            values.append(Value(rows(), dims))
    return Analysis(graph, values, batch)


class Workers:
    """Workers that run a program step by step, each with its own copies of the variables.

    Args:
        program: a function of tensors with the rows of a batch as their first axis.
        inputs: arrays of a whole batch.
        size: the number of workers.
        static: whether the program knows the number of rows.
        partial: the variables that are sums of parts, one part on each worker.
    """

    def __init__(self, program, inputs, size: int, *, static: bool = False, partial=()):
        inputs = [np.asarray(x) for x in inputs]
        self.concrete = trace(program, inputs, static=static)
        self.analysis = analyze(self.concrete, inputs, static=static, partial=partial)
        self.meeting = Meeting(size)
        self.variables = [
            v for v in self.concrete.graph.variables if v.dtype not in (tf.resource, tf.variant)
        ]
        self.partial = {id(v) for v in partial} | {id(v.handle) for v in partial}
        self.copies = [[self._copy(v, rank) for v in self.variables] for rank in range(size)]
        self.functions = [self._function(rank, inputs) for rank in range(size)]

    def is_partial(self, variable) -> bool:
        return id(variable) in self.partial or id(variable.handle) in self.partial

    def _copy(self, variable, rank: int):
        value = variable.read_value()
        if self.is_partial(variable) and rank:
            value = tf.zeros_like(value)
        return tf.Variable(value, dtype=variable.dtype, shape=variable.shape)

    def _function(self, rank: int, inputs):
        own_handles = {
            id(variable.handle): copy.handle
            for variable, copy in zip(self.variables, self.copies[rank], strict=True)
        }
        outer = [own_handles.get(id(t), t) for t, _ in self.concrete.graph.captures]
        communication = Simulated(self.meeting, rank)

        def step(total, first, counts, *parts):
            share = RowShare(
                rows=tf.shape(parts[0])[0],
                total=total,
                first=first,
                has_rows=counts,
                has_first_row=counts & tf.equal(first, 0),
                is_first=tf.constant(rank == 0),
            )
            communication.share = share
            partition = Partition(self.analysis, WorkerEmitter(share, communication))
            return partition.add([*parts, *outer], [WHOLE] * len(self.concrete.graph.outputs))

        scalars = [tf.TensorSpec([], t) for t in (tf.int32, tf.int32, tf.bool)]
        parts = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in inputs]
        return tf.function(step, autograph=False, input_signature=[*scalars, *parts])

    def step(self, inputs, shares):
        """Runs the program on a batch; returns each worker's results."""
        inputs = [np.asarray(x) for x in inputs]
        results: list[Any] = [None] * len(shares)

        def work(rank: int) -> None:
            first, own = sum(shares[:rank]), shares[rank]
            parts = [x[first : first + own] if own else x[:1] for x in inputs]
            scalars = [sum(shares), first if own else 0, own > 0]
            try:
                found = self.functions[rank](*map(tf.constant, [*scalars, *parts]))
                results[rank] = [r.numpy() for r in found]
            except BaseException as error:
                results[rank] = error
                self.meeting.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(shares))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            raise min(errors, key=lambda error: "BrokenBarrierError" in str(error))
        return results

    def check_variables(self, tolerance: float = 1e-5) -> None:
        """Compares the variables, which the whole program has updated, with their copies."""
        for i, variable in enumerate(self.variables):
            copies = [own[i].numpy() for own in self.copies]
            if self.is_partial(variable):
                copies = [np.sum(copies, axis=0, dtype=copies[0].dtype)]
            for copy in copies:
                compare(copy, copies[0], 0, variable.name)
            compare(copies[0], variable.numpy(), tolerance, variable.name)


def compare(actual, expected, tolerance: float, name) -> None:
    """Compares arrays: numbers within a tolerance, all else exactly."""
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    if expected.dtype.kind in "SOUb" or tolerance == 0:
        is_number = expected.dtype.kind in "fc"
        assert np.array_equal(actual, expected, equal_nan=is_number), (name, actual, expected)
    else:
        np.testing.assert_allclose(
            actual, expected, rtol=tolerance, atol=tolerance, err_msg=str(name)
        )


def run(program, inputs, shares, *, static: bool = False, partial=()):
    """Runs a program on workers, once.

    Args:
        program: a function of tensors with the rows of a batch as their first axis.
        inputs: arrays of the whole batch.
        shares: each worker's number of rows.
        static: whether the program knows the number of rows.
        partial: the variables that are sums of parts, one part on each worker.

    Returns:
        Each worker's results, the bytes that were communicated, and the analysis.
    """
    workers = Workers(program, inputs, len(shares), static=static, partial=partial)
    results = workers.step(inputs, shares)
    return results, workers.meeting.bytes, workers.analysis


def check(
    program,
    inputs,
    shares,
    *,
    static: bool = False,
    tolerance: float = 1e-5,
    equal=True,
    partial=(),
    steps: int = 1,
):
    """Compares a partitioned program with the whole one, and the variables that they update.

    Returns:
        The bytes that were communicated, and the analysis.
    """
    inputs = [np.asarray(x) for x in inputs]
    workers = Workers(program, inputs, len(shares), static=static, partial=partial)
    whole = workers.concrete
    for step in range(steps):
        order = np.roll(shares, step)
        expected = [r.numpy() for r in tf.nest.flatten(whole(*map(tf.constant, inputs)))]
        results = workers.step(inputs, [int(own) for own in order])
        for rank, result in enumerate(results):
            for i, (actual, wanted) in enumerate(zip(result, expected, strict=True)):
                compare(actual, wanted, tolerance, f"rank {rank}, result {i}")
                if equal:
                    compare(actual, results[0][i], 0, f"rank {rank}, result {i}")
        workers.check_variables(tolerance)
    return workers.meeting.bytes, workers.analysis


def gathers(analysis) -> list[str]:
    """Returns the types of the operations that gather rows, at any depth of function calls."""
    found = []
    for op, decision in analysis.decisions.items():
        for tensor, layout in zip(op.inputs, decision.inputs, strict=True):
            own = analysis.value_of(tensor).layout
            if own.kind == "rows" and layout is not None and layout != own:
                found.append(op.type)
        for part in decision.parts:
            found += gathers(part)
    return found
