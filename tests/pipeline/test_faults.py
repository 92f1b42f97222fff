"""Failures in a pipeline: every rank raises, and says who failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import tfdist
from tests.harness.deadlines import FAR
from tests.harness.groups import GROUPS
from tests.harness.ranks import Ranks
from tests.harness.tiers import exhaustive
from tfdist._src.launch.job.ports import Reservation


@pytest.fixture
def pair():
    """Two ranks that are not used again."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def run(ranks, fault):
    return ranks.answers(f"tests.pipeline.faults:{fault}", timeout=FAR)


@exhaustive
def test_a_layer_that_raises_on_one_rank(pair):
    (done, first), (also_done, second) = run(pair, "a_layer_fails")
    assert not done
    assert not also_done
    assert "this layer is worn out" in second
    assert "worker 1" in first
    assert "which holds stage 1, failed: InvalidArgumentError" in first


@exhaustive
def test_a_stage_that_cannot_be_traced():
    (done, first), (also_done, second) = run(GROUPS["2"], "a_layer_cannot_be_traced")
    assert not done
    assert not also_done
    assert "this layer cannot be trained" in second
    assert "worker 1" in first
    assert "could not build its stages" in first
    assert "this layer cannot be trained" in first


def test_a_worker_that_dies(pair):
    (done, first), _ = run(pair, "a_worker_dies")
    assert not done
    assert "worker 1" in first
    assert "Unavailable" in first


@exhaustive
def test_a_worker_that_never_comes():
    with Reservation(2) as ports:
        environment = of_worker(0, ports.ports) | {"TFDIST_START_TIMEOUT": "2"}
        program = [sys.executable, "-c", "import tfdist; tfdist.PipelineStrategy()"]
        done = subprocess.run(program, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"worker 1 (127.0.0.1:{ports.ports[1]})" in done.stderr.splitlines()[-1]


def test_workers_that_do_not_divide_into_pipelines(monkeypatch):
    """Told at once, before anybody waits for the others."""
    for name, value in of_worker(0, range(5000, 5004)).items():
        monkeypatch.setenv(name, value)
    message = "a multiple of `pipeline_size`. Received: pipeline_size=3 for 4 workers"
    with pytest.raises(ValueError, match=message):
        tfdist.HybridStrategy(pipeline_size=3)


def of_worker(index, ports):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_ranks_that_read_different_data():
    answers = run(GROUPS["2"], "different_data")
    for done, text in answers:
        assert not done
        assert "ProgramMismatchError" in text
        assert "has no more batches where worker 1" in text


def test_what_is_refused():
    for messages in GROUPS["2"].run("tests.pipeline.faults:refuse"):
        assert "it cannot be called" in messages["called"]
        assert messages["outside"].startswith("UnsupportedError: A PipelineModel requires a")
        assert "a multiple of `pipeline_size`. Received: pipeline_size=3 for 2" in messages["size"]
        assert messages["microbatches"].startswith("ValueError: `microbatches`")
        assert "gpipe" in messages["schedule"]
        assert "run_eagerly=True" in messages["eager"]
        assert "overrides `train_step`" in messages["own step"]
        assert messages["no model"].startswith("ValueError: `model` must be")
        assert "fist" in messages["cuts"]
