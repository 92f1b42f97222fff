"""Functions that are called when a step of a training gets somewhere."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
import tensorflow as tf


@contextlib.contextmanager
def calling_before(module, name, call):
    """Within this context, a function is called before each operation that another one makes."""
    original = getattr(module, name)

    def hooked(*args, **kwargs):
        with running(call):
            return original(*args, **kwargs)

    with mock.patch.object(module, name, hooked):
        yield


def running(call):
    """Calls a function before what is run, or added to a graph, in the returned context."""
    if tf.executing_eagerly():
        call()
        return contextlib.nullcontext()
    return tf.control_dependencies([tf.numpy_function(lambda: call() or np.int32(0), [], tf.int32)])
