"""Gradients of pipelines side by side, compressed between them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.harness import gpus
from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import assert_close
from tfdist.compression import CODECS

PACKAGE = "tests.pipeline.compressed_behaviours"
_TIED_DIFFER = "'embedding/embeddings' differs between worker 0 and worker 2."


def run(group, behaviour, *args):
    return GROUPS[group].run(f"{PACKAGE}:{behaviour}", *args)


def check_equal(results):
    """All who hold a variable hold the same bits; they, together."""
    held = {}
    for rank, result in enumerate(results):
        for i, value in result["weights"].items():
            assert np.array_equal(held.setdefault(i, value), value), f"variable {i}, rank {rank}"
    return held


@pytest.mark.parametrize(
    ("codec", "tied"),
    some(
        itertools.product(["int8", "fp16", "onebit", "topk", "powersgd"], [False, True]),
        always=[],
    ),
)
def test_two_pipelines_train_close_to_exact_gradients(codec, tied):
    results = run("4", "train", codec, 2, tied)
    check_equal(results)
    exact = reference(f"{PACKAGE}:train", None, 0, tied)
    losses = results[0]["history"]["loss"]
    # Top-k sends one value in a hundred; it is compared with data parallelism below.
    tolerance = 0.2 if codec == "topk" else 0.05
    assert losses == pytest.approx(exact["history"]["loss"], rel=tolerance)
    kept = CODECS[codec]().kept((16, 16))
    assert all(bool(result["kept"]) == bool(kept) for result in results)


@exhaustive
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("codec", ["int8", "onebit", "topk", "powersgd"])
@pytest.mark.parametrize("group", ["4 GPUs", "4 GPUs through the host"])
def test_on_gpus_as_on_cpus(group, codec, tied):
    expected = run("4", "train", codec, 2, tied)
    results = run(group, "on_gpus", "train", codec, 2, tied)
    weights, of_cpus = check_equal([result for result, *_ in results]), check_equal(expected)
    for i, value in of_cpus.items():
        assert np.array_equal(weights[i], value), f"variable {i}"
    by_nccl = group == "4 GPUs" and codec in ("int8", "onebit")
    for (result, names, sends, devices, has_gpu, _), same in zip(results, expected, strict=True):
        assert _all_of_gpus(names) and bool(names) == (codec in ("int8", "onebit"))
        assert has_gpu and sends == by_nccl
        assert set(result["kept"]) == set(same["kept"])
        if gpus.have_devices() and codec in ("onebit", "topk"):
            assert devices == ["GPU"]


@exhaustive
@pytest.mark.parametrize("codec", ["int8", "onebit", "topk"])
def test_gpus_of_a_host_sum_exactly_first(codec):
    expected = run("6 on 5 hosts", "from_host_to_host", codec)
    results = run("6 GPUs on 5 hosts by NCCL", "on_gpus", "from_host_to_host", codec)
    check_equal([result for result, *_ in results])
    assert any(names for _, names, *_ in results) == (codec != "topk")
    shared = [in_host == "GpuCommunicator" for *_, in_host in results]
    assert shared == [False, True, True, False, False, False]
    for (result, names, _, devices, has_gpu, _), same in zip(results, expected, strict=True):
        assert _all_of_gpus(names) and has_gpu
        assert set(result["kept"]) == set(same["kept"])
        if gpus.have_devices() and result["kept"]:
            assert devices == ["GPU"]
        # NCCL adds what is not compressed in another order.
        assert result["history"]["loss"] == pytest.approx(same["history"]["loss"], rel=0.02)


def _all_of_gpus(names):
    return all(name.endswith(", GPUs") for name in names)


@exhaustive
# Those that compress each gradient by itself, whatever the others are. With 33 rows the second
# pipeline has none in the last step.
@pytest.mark.parametrize(
    ("codec", "rows"),
    list(itertools.product(["topk", "powersgd", "threshold"], [45, 33])),
)
def test_what_data_parallelism_gives(codec, rows):
    expected = run("2", "train", codec, 0, False, "sgd", rows)
    results = run("4", "train", codec, 2, False, "sgd", rows)
    weights = check_equal(results)
    assert_close(weights, expected[0]["weights"], "weights")
    assert_close(results[0]["history"], expected[0]["history"], "history")


@pytest.mark.parametrize("tied", some([False, True], always=[]))
def test_nothing_to_compress_with_one_pipeline(tied):
    expected = reference(f"{PACKAGE}:train", None, 0, tied)
    results = run("2", "train", "onebit", 2, tied)
    assert_close(check_equal(results), expected["weights"], "weights")
    for result in results:
        assert_close(result["history"], expected["history"], "history")
        assert result["kept"] == {}


@exhaustive
@pytest.mark.parametrize("group", ["4", "4 GPUs"])
@pytest.mark.parametrize("optimizer", ["adam", "accumulation", "scaling"])
def test_in_ways_of_keras(group, optimizer):
    results = run(group, "compressed_and_not", [optimizer])
    for case in results[0]:
        compressed, plain = zip(*(result[case] for result in results), strict=True)
        check_equal(compressed)
        expected = reference(f"{PACKAGE}:train", None, 0, case[1], optimizer)
        assert_close(check_equal(plain), expected["weights"], f"{case}")
        loss = compressed[0]["history"]["loss"]
        assert loss[-1] < loss[0]
        assert loss != plain[0]["history"]["loss"]


@exhaustive
@pytest.mark.parametrize("group", ["4", "4 GPUs"])
def test_overflow_in_one_pipeline(group):
    results = run(group, "overflow")
    check_equal(results)
    for result in results:
        assert result["skipped"]
        assert not any(value.any() for value in result["kept"].values())
        assert result["scale"] == 2.0**14
        assert result["went on"]


@exhaustive
@pytest.mark.parametrize("group", ["4", "4 GPUs"])
def test_callbacks_change_the_codec_during_training(group):
    results = run(group, "scheduled")
    check_equal(results)
    exact = run(group, "train", None, 2, True)[0]["history"]["loss"]
    for result in results:
        assert result["names"] == ["none", "onebit", "topk", "none"]
        loss = result["history"]["loss"]
        assert loss[0] == exact[0]
        assert loss[1] != exact[1]
        assert loss[-1] < loss[0]
        assert result["history"]["sent_bytes"] == [0] * 4  # All are on one host.


@exhaustive
@pytest.mark.parametrize(
    ("layer", "at", "who"),
    [
        # Ranks 0 and 1 hold the first stage, 2 and 3 the second.
        ("first", 1, "'first/kernel' differs between worker 0 and worker 1."),
        ("second", 3, "'second/kernel' differs between worker 2 and worker 3."),
        ("embedding", 2, _TIED_DIFFER),
    ],
)
def test_the_audit_names_the_difference_on_all_ranks(layer, at, who):
    for said in run("4", "drift", layer, at):
        assert said.startswith("After 1 batches the replicas are not equal")
        assert who in said


@exhaustive
@pytest.mark.parametrize("group", ["4", "4 GPUs"])
@pytest.mark.parametrize("how", ["load_weights", "load_model"])
def test_resuming_from_files(group, how, tmp_path):
    for rank, (whole, again, said) in enumerate(run(group, "resume", str(tmp_path), how)):
        assert said == []
        assert whole["kept"] and all(value.any() for value in whole["kept"].values())
        for name in ("weights", "kept"):
            for key, value in whole[name].items():
                assert np.array_equal(value, again[name][key]), f"{name} {key}, rank {rank}"


@exhaustive
def test_resuming_in_other_stages(tmp_path):
    run("4", "resume", str(tmp_path), "load_model")
    path = str(tmp_path / "model.keras")
    for _, said in run("4", "resume_from", path, "load_model", 4):
        assert said == []  # One pipeline has nothing to compress.
    for _, said in run("4", "resume_from", path, "load_model", 1):
        assert len(said) == 1
        assert "belongs to other weights" in said[0]


@exhaustive
# Ranks 0, 1 and 2 hold the first stage, and two of them share a host; 3, 4 and 5 the second.
@pytest.mark.parametrize("codec", [None, "int8", "onebit", "powersgd"])
def test_hosts_of_several_workers(codec):
    results = run("6 on 5 hosts", "from_host_to_host", codec)
    check_equal(results)
    assert {result["hosts"] for result in results} == {(0, 1, 1), (0, 1, 2)}
    assert all(result["active"] == (set() if codec is None else {True}) for result in results)
    loss = results[0]["history"]["loss"]
    assert loss[-1] < loss[0]
    assert all(min(result["history"]["sent_bytes"]) > 0 for result in results)


@exhaustive
def test_a_choice_by_measurement():
    """Ranks 0 and 1, on one host, have nothing to choose; 2 and 3 have."""
    results = run("4, the last on another host", "automatic")
    check_equal(results)
    for rank, result in enumerate(results):
        measuring = ["none", "none", "onebit", "onebit"]
        assert result["names"] == (measuring if rank > 1 else ["none"] * 4)
        assert bool(result["kept"]) == (rank > 1)
        loss = result["history"]["loss"]
        assert loss[-1] < loss[0]
