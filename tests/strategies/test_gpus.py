"""Gradients stay on GPUs, which threads stand for: the result is that of one process."""

import itertools

import pytest

from tests import gpus
from tests.groups import GROUPS
from tests.ranks import Ranks
from tests.strategies.comparison import PACKAGE, behaviours, check_same_as_alone
from tests.tiers import exhaustive, some

ALL = behaviours("models") + behaviours("optimizers") + behaviours("execution")
OWN = "2 GPUs by own kernels"
# Whether what computes the sums are kernels of tfdist, and whether it is NCCL.
TRANSPORTS = {
    OWN: (True, False),
    "2 GPUs by NCCL": (False, True),
    "2 GPUs through the host": (False, False),
    "2 GPUs": (True, False),
    "2 GPUs on 2 hosts": (False, True),
}
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
        + list(itertools.product([group for group in TRANSPORTS if group != OWN], SOME)),
        always=[(OWN, "optimizers:momentum_and_schedule")],
    ),
)
def test_two_workers(group, behaviour):
    if behaviour in BY_CUDNN and gpus.have_devices():
        pytest.skip("Keras takes CuDNN's kernels for these layers on a GPU, and there is none")
    check_same_as_alone(group, behaviour)


@exhaustive
@pytest.mark.parametrize("group", TRANSPORTS)
def test_what_computes_the_sums(group):
    kernels, nccl = TRANSPORTS[group]
    for launches, calls, sums in GROUPS[group].run(f"{PACKAGE}.gpus:reduce"):
        assert (launches > 0, calls > 0) == (kernels, nccl)
        assert sums == [3.0, 3, 6.0]


@exhaustive
@pytest.mark.parametrize(
    ("hosts", "transport", "said"),
    [
        (2, "own", "since there are several hosts."),
        (1, "smoke", "TFDIST_DEVICE_ALGORITHM must be one of own, nccl, host."),
    ],
)
def test_what_cannot_be_is_refused_on_all_workers(hosts, transport, said):
    group = Ranks(2, hosts=hosts, gpus=transport)
    for done, text in group.answers(f"{PACKAGE}.gpus:reduce"):
        assert not done
        assert said in text.strip().splitlines()[-1]
    group.stop()


@exhaustive
def test_a_large_sum_is_left_to_nccl():
    for launches, calls in GROUPS["2 GPUs"].run(f"{PACKAGE}.gpus:reduce_much"):
        assert (launches, calls) == (0, 1)
