"""What each worker is started with."""

from __future__ import annotations

import json
import shlex

from tfdist._src.cluster import from_tf_config
from tfdist._src.launch.job.worker import plan_workers

ADDRESSES = ("10.0.0.1:4000", "10.0.0.1:4001", "[fd00::2]:4002")


def plans():
    return plan_workers(
        addresses=ADDRESSES,
        first=1,
        command=["python", "-u", "my train.py"],
        shared={"OMP_NUM_THREADS": "2"},
        per_worker=[{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": ""}],
    )


def test_ranks_and_settings():
    one, two = plans()
    assert (one.rank, two.rank) == (1, 2)
    assert one.settings["OMP_NUM_THREADS"] == two.settings["OMP_NUM_THREADS"] == "2"
    assert one.settings["CUDA_VISIBLE_DEVICES"] == "0"
    assert two.settings["CUDA_VISIBLE_DEVICES"] == ""


def test_each_worker_gets_its_tf_config():
    for plan in plans():
        assert json.loads(plan.settings["TF_CONFIG"]) == {
            "cluster": {"worker": list(ADDRESSES)},
            "task": {"type": "worker", "index": plan.rank},
        }
        topology = from_tf_config(plan.settings["TF_CONFIG"])
        assert (topology.rank, topology.size) == (plan.rank, 3)


def test_as_a_line_for_a_shell():
    plan = plans()[1]
    words = shlex.split(str(plan))
    assert words[-3:] == ["python", "-u", "my train.py"]
    assert dict(word.split("=", 1) for word in words[:-3]) == plan.settings
