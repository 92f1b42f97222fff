"""TensorFlow's profiler is read as it writes: names, times, and threads of operations."""

from __future__ import annotations

import itertools
import time

import tensorflow as tf

from tfdist._src.monitoring.chrome_trace import OpProfile


def test_operations_of_some_steps():
    @tf.function
    def twice(x):
        return tf.linalg.matmul(x, tf.linalg.matmul(x, x, name="inner"), name="outer")

    x = tf.ones((50, 50))
    twice(x)
    # Of a training that has failed.
    left = OpProfile()
    left.start()
    twice(x)
    profile = OpProfile()
    profile.start()
    begin = time.time_ns()
    for _ in range(3):
        twice(x)
    end = time.time_ns()
    ahead = 10**12
    spans = profile.stop(ahead)
    products = sorted((s for s in spans if "MatMul" in s.name), key=lambda span: span.begin)
    assert [s.name.partition(":")[0] for s in products] == ["inner", "outer"] * 3
    for before, after in itertools.pairwise(products):
        assert begin <= before.begin - ahead < before.end - ahead <= end
        assert before.end <= after.begin
    assert all(s.lane.rpartition(" ")[2].isdigit() for s in spans)
    assert profile.stop(0) == left.stop(0) == []


def test_a_profiler_in_use_is_told(tmp_path, caplog):
    tf.profiler.experimental.start(str(tmp_path))
    try:
        profile = OpProfile()
        profile.start()
    finally:
        tf.profiler.experimental.stop()
    assert profile.stop(0) == []
    (message,) = caplog.messages
    assert "profile_batch=0" in message
