"""What a worker that takes another one's state keeps of its own meanwhile."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist._src.recovery import state_transfer
from tfdist._src.recovery.state_transfer import ReplacedValues


@pytest.mark.parametrize("most", [1 << 30, 11])
def test_replaced_values_are_put_back_if_they_are_not_too_many(monkeypatch, most):
    monkeypatch.setattr(state_transfer, "_MAX_KEPT_BYTES", most)
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3)]
    replaced = ReplacedValues()
    for variable in variables:
        replaced.keep(variable.read_value(), variable.assign)
        variable.assign(variable + 1)
    assert replaced.put_back() == (most > 11)
    values = [variable.numpy().tolist() for variable in variables]
    assert values == ([[1.0, 2.0], 3] if most > 11 else [[2.0, 3.0], 4])
