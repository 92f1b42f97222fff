"""The sums of slices that have the same index."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.tiers import exhaustive
from tfdist.trainer.optimizers.repeated_slices import add_repeated

pytestmark = exhaustive


def sums(values, indices):
    slices = add_repeated(tf.IndexedSlices(values, indices, tf.constant([40])))
    return slices.values, slices.indices


@pytest.mark.parametrize("run", ["eagerly", "in_a_graph", "by_xla"])
def test_the_first_slice_of_an_index_is_the_sum(run):
    call = sums if run == "eagerly" else tf.function(sums, jit_compile=run == "by_xla")
    generator = np.random.default_rng(0)
    for count, kinds, shape in [
        (0, 3, (2,)),
        (1, 3, (2,)),
        (500, 7, (4, 2)),
        (513, 1, ()),
        (9, 40, ()),
    ]:
        given = generator.normal(size=(count, *shape)).astype("float32")
        indices = generator.integers(0, kinds, count)
        values, rising = (each.numpy() for each in call(tf.constant(given), tf.constant(indices)))
        assert rising.tolist() == sorted(indices)
        for index in range(kinds):
            of_one = values[rising == index]
            if len(of_one):
                expected = given[indices == index].astype("float64").sum(0)
                np.testing.assert_allclose(of_one[0], expected, rtol=1e-5, atol=1e-5)
            assert not of_one[1:].any()
