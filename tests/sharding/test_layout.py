"""Shards cover every element once and have equal sizes."""

from __future__ import annotations

import itertools

import pytest

from tfdist._src.sharding import make_buckets

SIZES = [[1], [2, 3], [0, 5, 0, 1], [1000, 1, 1, 7], [3, 3, 3]]


@pytest.mark.parametrize(("sizes", "ranks"), [*itertools.product(SIZES, [1, 2, 3, 5])])
def test_every_element_has_one_owner(sizes, ranks):
    groups = [range(len(sizes) - 1, 1, -1), range(min(2, len(sizes)))]
    owned = {(i, e): 0 for i, size in enumerate(sizes) for e in range(size)}
    for bucket in make_buckets(sizes, groups, ranks):
        assert bucket.shard_size * ranks == bucket.size + bucket.padding
        assert bucket.padding < ranks
        for rank in range(ranks):
            offset = 0
            for range_ in bucket.ranges(rank):
                assert range_.offset == offset
                offset += range_.size
                for element in range(range_.start, range_.stop):
                    owned[range_.variable, element] += 1
            assert offset <= bucket.shard_size
            assert offset == bucket.shard_size or rank >= bucket.size // bucket.shard_size
    assert set(owned.values()) == {1}
