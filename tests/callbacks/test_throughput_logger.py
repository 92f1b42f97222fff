"""The figures of a training are there, and add up."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive

WAITS = ["input_wait", "workers_wait", "network_wait"]


@exhaustive
@pytest.mark.parametrize("how", ["fit", "several", "eagerly", "pipeline"])
@pytest.mark.parametrize("group", ["1", "2", "2 hosts", "2x2", "2 by TensorFlow"])
def test_figures_of_an_epoch(group, how):
    if how == "pipeline" and group not in ("2", "2 hosts"):
        pytest.skip("pipelines have a native core and a device per worker")
    for history, _ in GROUPS[group].run("tests.callbacks.observing:logged", how):
        assert all(len(values) == 3 for values in history.values()), history
        for epoch in range(3):
            now = {name: values[epoch] for name, values in history.items()}
            assert 0 < now["step_seconds"] <= now["step_seconds_p95"]
            # Six steps, of which the first of all, and those with it, are left out.
            rows = now["rows_per_second"]
            assert rows > 0
            assert (group == "2 by TensorFlow") <= (not any(name in now for name in WAITS))
            if group not in ("1", "2 by TensorFlow"):
                assert all(0 <= now[name] <= 1 for name in WAITS)
                assert sum(now[name] for name in WAITS) <= 1.01
                assert (now["sent_bytes_per_step"] > 0) == (group == "2 hosts")
                assert now["bus_bytes_per_second"] > 0


@exhaustive
def test_figures_of_batches():
    for seen, history in GROUPS["2"].run("tests.callbacks.observing:logged_in_batches"):
        # None in the first two, then a new one after every third batch.
        assert seen[:2] == [None, None]
        assert len(set(seen[2:])) == 3
        assert seen[2:5] == [seen[2]] * 3
        tokens, rows = history["tokens_per_second"][0], history["rows_per_second"][0]
        assert tokens == pytest.approx(5 * rows)


@exhaustive
def test_the_bar_shows_the_figures():
    shown, _ = GROUPS["2"].run("tests.callbacks.observing:bar")
    last = shown.replace("\r", "\n").strip().splitlines()[-1]
    assert "10/10" in last
    for name in ("rows_per_second: ", "workers_wait: ", "step_seconds: "):
        assert name in last, shown


@exhaustive
def test_a_tensorboard_reads_the_figures(tmp_path):
    history, _ = GROUPS["2"].run("tests.callbacks.observing:in_tensorboard", str(tmp_path))
    events = EventAccumulator(str(tmp_path / "train"), size_guidance={"tensors": 0})
    events.Reload()

    def values(tag):
        return [float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]

    for name in ("rows_per_second", "step_seconds", "workers_wait"):
        assert values(f"epoch_{name}") == pytest.approx(history[name])
        assert values(f"batch_{name}")
