"""Gradients stay on GPUs, which threads stand for: the result is that of one process."""

import itertools

import numpy as np
import pytest

from tests.harness import gpus
from tests.harness.groups import GROUPS
from tests.harness.ranks import Ranks
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import (
    PACKAGE,
    assert_close,
    assert_equal,
    behaviours,
    check_same_as_alone,
)

ALL = behaviours("models") + behaviours("optimizers") + behaviours("execution")
OWN = "2 GPUs by own kernels"
NCCL = "2 GPUs by NCCL"
# Whether sums take kernels of tfdist, NCCL, and copies to the host and back.
TRANSPORTS = {
    OWN: [True, False, False],
    NCCL: [False, True, False],
    "2 GPUs through the host": [False, False, True],
    "2 GPUs": [True, False, False],
    "2 GPUs on 2 hosts": [False, True, False],
    "1x2 GPUs": [True, False, False],
    "2x2 GPUs": [True, False, False],
    "2x2 GPUs by NCCL": [False, True, False],
    "2x2 GPUs through the host": [False, False, True],
    "2x2 GPUs on 2 hosts": [False, True, False],
}
SELECTED = [OWN, NCCL, "2 GPUs through the host", "1x2 GPUs"]  # By `simulated_gpus`.
NO_DRIVER = {"TFDIST_CUDA_LIBRARY": "/none/libcuda.so.1"}
NO_NCCL = {"TFDIST_NCCL_LIBRARY": "/none/libnccl.so.2"}
QUANTIZERS = ["int8", "onebit", "natural", "signum", "ef_signsgd"]
SPARSIFIERS = ["topk", "dgc", "threshold"]
BY_CUDNN = ["models:lstm_with_masking", "models:masked_loss_over_time"]
SOME = [
    "models:convolution",
    "models:embedding_with_sparse_gradients",
    "models:synchronized_batch_normalization",
    "optimizers:momentum_and_schedule",
    "optimizers:mixed_float16",
    "optimizers:gradient_accumulation",
    "execution:custom_loop",
    "execution:gradients_through_all_reduce",
    "execution:several_steps_per_execution",
]


@pytest.mark.parametrize(
    ("group", "behaviour"),
    some(
        [(OWN, behaviour) for behaviour in ALL]
        + list(itertools.product([group for group in TRANSPORTS if group != OWN], SOME))
        + [("1x2 GPUs", "execution:eagerly"), ("2x2 GPUs", "execution:eagerly")]
        + [("2 GPUs with TLS", "optimizers:momentum_and_schedule")],
        always=[],
        simulated_gpus=[
            (OWN, "models:embedding_with_sparse_gradients"),
            *((group, "optimizers:momentum_and_schedule") for group in SELECTED),
        ],
    ),
)
def test_two_workers_give_the_result_of_one_process(group, behaviour):
    if behaviour in BY_CUDNN and gpus.have_devices():
        pytest.skip("Keras takes CuDNN's kernels for these layers on a GPU, and there is none")
    check_same_as_alone(group, behaviour)


@exhaustive
@pytest.mark.parametrize("group", TRANSPORTS)
def test_what_computes_the_sums(group):
    GROUPS[group].run(f"{PACKAGE}.gpus:reduce")  # The first one tries what there is.
    ranks = range(1, _participants(group) + 1)
    for names, taken, sums in GROUPS[group].run(f"{PACKAGE}.gpus:reduce"):
        assert set(names) == {"GpuCommunicator"}
        assert taken == TRANSPORTS[group]
        assert sums == [[sum(ranks), sum(ranks), 2 * sum(ranks)]] * len(names)


@pytest.mark.parametrize("group", some(TRANSPORTS, always=[], simulated_gpus=[NCCL]))
def test_other_collectives_take_nccl_or_the_host(group):
    size = _participants(group)
    GROUPS[group].run(f"{PACKAGE}.gpus:move")
    for worker, (found, taken) in enumerate(GROUPS[group].run(f"{PACKAGE}.gpus:move")):
        # There are no kernels of tfdist for them.
        assert taken[1] == (group != OWN and "through" not in group)
        for device, (gathered, first, part) in enumerate(found):
            rank = worker * len(found) + device
            assert gathered == [[float(r)] * 2 for r in range(size) for _ in range(r + 1)]
            assert first == [7.0] * 3
            assert part == [[2.0 * rank * size, (2.0 * rank + 1) * size]]


@exhaustive
def test_a_mirrored_strategy_of_gpus():
    ((alone, _),) = GROUPS["alone"].run(f"{PACKAGE}.gpus:train_mirrored")
    ((losses, taken),) = GROUPS["1x2 GPUs"].run(f"{PACKAGE}.gpus:train_mirrored")
    assert taken[:2] == [True, False]
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


@exhaustive
@pytest.mark.parametrize("group", TRANSPORTS)
def test_buckets_are_launched_one_behind_the_other(group):
    train = f"{PACKAGE}.gpus:train_in_many_buckets"
    ((expected, _),) = GROUPS["alone"].run(train)
    results = GROUPS[group].run(train)
    for rank, (result, waits) in enumerate(results):
        assert waits  # At the end of each step, for all of them.
        assert_close(result, expected, f"rank {rank}")
        assert_equal(result["weights"], results[0][0]["weights"], f"rank {rank}")


@exhaustive
def test_what_looks_at_results_does_not_see_them_early():
    if gpus.have_devices():
        pytest.skip("TensorFlow cannot place its checks on this device: pip install tensorflow")
    ((expected, _),) = GROUPS["alone"].run(f"{PACKAGE}.gpus:train_in_many_buckets")
    for result, waits in GROUPS["2 GPUs"].run(f"{PACKAGE}.gpus:train_with_checked_numerics"):
        assert_close(result, expected, "weights")
        assert not waits


@exhaustive
def test_a_large_sum_is_left_to_nccl():
    for taken, moved, through_host in GROUPS["2 GPUs"].run(f"{PACKAGE}.gpus:reduce_much"):
        assert taken == [False, True, False]
        assert moved == 400_000 > through_host


@pytest.mark.parametrize("group", some(TRANSPORTS, always=[], simulated_gpus=SELECTED))
def test_sums_wait_for_the_gpu(group):
    if not gpus.have_devices():
        pytest.skip("TensorFlow has kernels for real GPUs: pip install tensorflow-cpu")
    for sums in GROUPS[group].run(f"{PACKAGE}.gpus:reduce_what_comes_late"):
        assert sums == [[float(_participants(group)) * i] * 1000 for i in range(3)]


@pytest.mark.parametrize(
    ("group", "name"),
    some(
        itertools.product([NCCL, "2 GPUs through the host"], [*QUANTIZERS, *SPARSIFIERS]),
        always=[],
        simulated_gpus=[(NCCL, "onebit"), (NCCL, "topk")],
    ),
)
def test_compressed_gradients_are_those_of_cpus(group, name):
    expected = GROUPS["2"].run(f"{PACKAGE}.compressed:every_codec", name)[0]
    for result, taken, devices in GROUPS[group].run(f"{PACKAGE}.gpus:compress", name):
        assert_equal(result["weights"], expected["weights"], name)
        assert taken[0] == (group == NCCL)
        assert taken[-1] == (group == NCCL and name not in SPARSIFIERS)
        if gpus.have_devices() and name not in ("int8", "natural"):
            assert devices == ["GPU"]


@exhaustive
@pytest.mark.parametrize("name", ["int8", "onebit"])
def test_compressed_buckets_are_launched_one_behind_the_other(name):
    train = f"{PACKAGE}.gpus:compress_in_buckets"
    expected, _ = GROUPS["2"].run(train, name)[0]
    for result, awaited in GROUPS[NCCL].run(train, name):
        assert len(awaited) > 1 and all(awaited)
        assert_equal(result["weights"], expected["weights"], name)


@exhaustive
@pytest.mark.parametrize("name", ["int8", "onebit"])
def test_gpus_of_a_host_sum_exactly_first(name):
    expected = GROUPS["3 on 2 hosts"].run(f"{PACKAGE}.compressed:from_host_to_host", name)[0]
    compress = f"{PACKAGE}.gpus:compress_between_hosts"
    results = GROUPS["3 GPUs on 2 hosts by NCCL"].run(compress, name)
    for result, *_ in results:
        assert_equal(result["weights"], expected["weights"], name)
    # With error feedback, only those that lead gradients.
    leads = [True, name == "int8", True]
    assert [taken[-1] for _, taken, *_ in results] == leads
    for (_, _, devices, by_host), leader in zip(results, leads, strict=True):
        assert by_host in ([False, name == "onebit"], [])
        kept = ["GPU"] if gpus.have_devices() else ["CPU"]
        assert devices == (kept if name == "onebit" and leader else [])


@exhaustive
@pytest.mark.parametrize("name", ["int8", "onebit", "signum"])
def test_all_gpus_of_workers_compress(name):
    expected = GROUPS["2x2"].run(f"{PACKAGE}.compressed:every_codec", name)[0]
    results = GROUPS["2x2 GPUs by NCCL"].run(f"{PACKAGE}.gpus:compress_on_several", name)
    for result, taken, devices, names in results:
        assert_equal(result["weights"], results[0][0]["weights"], name)
        assert taken[-1]
        if name == "int8":
            # The core encodes other blocks than where devices divide gradients.
            losses = result["history"]["loss"], expected["history"]["loss"]
            np.testing.assert_allclose(*losses, rtol=0.02)
            assert names == ["workers' GPUs"]
            continue
        assert names == ["device 0, GPUs", "device 1, GPUs"]
        assert_close(result["weights"], expected["weights"], name, 1e-6)
        assert devices == ["GPU"] or not gpus.have_devices()


@exhaustive
@pytest.mark.parametrize("name", SPARSIFIERS)
def test_a_worker_without_kernels_selects_the_same(name):
    expected = GROUPS["2"].run(f"{PACKAGE}.compressed:every_codec", name)[0]
    group = Ranks(2, gpus="nccl", strategy=False)
    results = group.run(f"{PACKAGE}.gpus:compress_with_kernels_on_one", name)
    for rank, (result, taken, _) in enumerate(results):
        assert_equal(result["weights"], expected["weights"], name)
        if gpus.have_devices():  # A CPU's operations select on it.
            assert taken[0] == (rank == 0)
    group.stop()


@exhaustive
def test_codecs_are_measured_on_gpus():
    (loss, taken), other = GROUPS[NCCL].run(f"{PACKAGE}.gpus:choose")
    assert (loss, taken) == other
    assert loss[1] < loss[0] and taken[0]


@exhaustive
def test_steps_hold_back_the_same_writes():
    expected = GROUPS["2"].run(f"{PACKAGE}.gpus:writes")
    assert expected[0][-1][1]
    assert GROUPS[OWN].run(f"{PACKAGE}.gpus:writes") == expected


@exhaustive
@pytest.mark.parametrize(
    ("group", "communicators"), [("2", ["workers"]), (OWN, ["workers", "workers' GPUs"])]
)
def test_communicators_hear_of_stalls(group, communicators):
    for told in GROUPS[group].run(f"{PACKAGE}.gpus:stalls"):
        assert told == communicators


@exhaustive
@pytest.mark.parametrize("transport", ["", "host"])
def test_a_gpu_that_cannot_be_used(transport):
    first, other = _made_anew("train_with", NO_DRIVER, gpus=transport)
    for kind, taken, _ in (first, other):
        assert kind == "CoreCommunicator"
        assert not any(taken)
    _assert_said(
        (first, other),
        "there is no driver (/none/libcuda.so.1: cannot open shared object file: No such file or "
        "directory). Install NVIDIA's driver, or start the container with its GPUs. Gradients are "
        "summed in the host's memory.",
    )


@exhaustive
def test_a_gpu_that_must_be_used_and_cannot():
    for error in _made_anew("train_with", NO_DRIVER, gpus="p2p"):
        assert "there is no driver (/none/libcuda.so.1: " in error


@exhaustive
@pytest.mark.simulated_gpus
def test_a_worker_without_a_gpu():
    if not gpus.have_devices():
        pytest.skip("TensorFlow sees no GPU here: pip install tensorflow-cpu")
    for error in _made_anew("without_a_gpu_on_one", gpus=""):
        assert "number of devices" in error
        assert "1 GPU" in error and "1 CPU" in error


@exhaustive
def test_kernels_that_nothing_can_compile():
    for _, taken, lines in _made_anew("train_without_nvrtc", gpus=""):
        assert taken == [False, True, False]
        (line,) = [line for line in lines if "no kernels for this GPU" in line]
        assert "NCCL or the host sums its gradients: NVRTC, which compiles" in line
        assert 'was not found. Install it: pip install "tensorflow[and-cuda]"' in line


@exhaustive
def test_hosts_without_nccl():
    results = _made_anew("train_with", NO_NCCL, hosts=2, gpus="")
    for _, taken, lines in results:
        assert taken == [False, False, True]
        assert any("there is no NCCL (/none/libnccl.so.2: " in line for line in lines)
    _assert_said(
        results,
        "uses none. All-reduces of GPU memory go through the host's memory.",
    )


@exhaustive
def test_nccl_does_not_send_in_the_clear_where_tls_is_set():
    results = _made_anew("train_with", {}, tls=True, gpus="")
    for _, taken, _ in results:
        assert taken == [False, False, True]
    _assert_said(
        results,
        "NCCL is not used, since TLS is set, but NCCL does not encrypt. All-reduces of GPU memory "
        "go through the host's memory.",
    )


@exhaustive
@pytest.mark.parametrize(
    ("hosts", "transport", "said"),
    [
        (2, "p2p", "since there are several hosts."),
        (1, "smoke", "TFDIST_DEVICE_ALGORITHM must be one of p2p, nccl, host, by_size."),
    ],
)
def test_what_cannot_be_is_refused_on_all_workers(hosts, transport, said):
    group = Ranks(2, hosts=hosts, gpus=transport)
    for done, text in group.answers(f"{PACKAGE}.gpus:reduce"):
        assert not done
        assert said in text
    group.stop()


def _made_anew(function, *arguments, **settings):
    """What a function returns on two workers that have no strategy yet."""
    group = Ranks(2, **settings, strategy=False)
    try:
        return group.run(f"{PACKAGE}.gpus:{function}", *arguments)
    finally:
        group.stop()


def _assert_said(results, text):
    """The first worker has said it once, and the other one has not."""
    said = [sum(text in line for line in lines) for *_, lines in results]
    assert said == [1, 0]


def _participants(group):
    return 4 if group.startswith("2x2") else 2
