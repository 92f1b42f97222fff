"""The context of a call of `fit`, for nested calls, errors and threads."""

import dataclasses
import threading

import pytest

from tfdist._src.data.call_context import Call, CallContext, current_context, entered


def changed(**changes):
    return entered(dataclasses.replace(current_context(), **changes))


def test_a_call_within_another_inherits_its_context_and_restores_it():
    before, data, fit, evaluate = current_context(), object(), Call(), Call()
    with changed(training_data=data), changed(call=fit, training_call=fit):
        outer = current_context()
        with changed(call=evaluate, training_call=None):
            assert current_context().training_data is data
            assert (current_context().call, current_context().training_call) == (evaluate, None)
        assert current_context() is outer
    assert current_context() is before


def test_an_error_restores_the_context():
    with changed(in_order=True):
        with pytest.raises(KeyError), changed(in_order=False, call=Call()):
            raise KeyError
        assert current_context().in_order
        assert current_context().call is None


def test_each_thread_has_its_own_context():
    found = []
    with changed(call=Call()):
        thread = threading.Thread(target=lambda: found.append(current_context()))
        thread.start()
        thread.join()
    assert found == [CallContext()]
