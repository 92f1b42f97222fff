"""Workers with several devices use the native collectives too."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.harness.groups import GROUPS
from tfdist._src.group import joined_group


def test_devices_share_the_traffic_between_workers():
    for result in GROUPS["2x2"].run(f"{__name__}:reduce_on_devices"):
        assert result["sums"] == [[10.0] * 1001] * 2
        assert result["collectives"] == [1, 1]


def reduce_on_devices(strategy):
    lanes = [joined_group().native(f"device {i}") for i in range(2)]
    before = [lane.traffic().collectives for lane in lanes]

    @tf.function
    def sums():
        def replica():
            context = tf.distribute.get_replica_context()
            value = tf.fill([1001], float(context.replica_id_in_sync_group + 1))
            return context.all_reduce("sum", value)

        return strategy.run(replica)

    values = strategy.experimental_local_results(sums())
    return {
        "sums": [np.asarray(value).tolist() for value in values],
        "collectives": [
            lane.traffic().collectives - b for lane, b in zip(lanes, before, strict=True)
        ],
    }
