"""What goes wrong is said in one line, on every worker, soon."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.harness.groups import GROUPS
from tests.harness.ranks import Ranks
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import PACKAGE

FAULTS = f"{PACKAGE}.faults"


KINDS = {
    "native": {},
    "native in TLS between hosts": {"tls": True},
    "tensorflow": {"native": False},
    "GPUs by own kernels": {"gpus": "p2p"},
    "GPUs by NCCL": {"gpus": "nccl"},
    "GPUs through the host": {"gpus": "host"},
}
WORDS = {"killed": ("is lost: ",), "ended": ("has left the job", "has left the group")}


@pytest.fixture
def group(kind):
    ranks = Ranks(3, **KINDS[kind])
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(
    ("kind", "fault"),
    some(itertools.product(KINDS, WORDS), always=[("native", "ended")]),
)
def test_the_others_name_a_worker_that_goes(group, fault):
    answers = group.answers(f"{FAULTS}:fit_until", fault, silent={1})
    said = WORDS[fault]
    for rank in (0, 2):
        done, message = answers[rank]
        assert done, message
        assert "worker 1 (127.0.0.1:" in message
        assert any(words in message for words in said)
        assert len(message.splitlines()) == 1


def test_different_models_are_refused_on_all_workers():
    for message in GROUPS["2"].run(f"{FAULTS}:different_models"):
        assert message.startswith("ProgramMismatchError: ")
        for part in ("worker 0 (", "worker 1 (", "float32(4, 3)", "float32(4, 4)"):
            assert part in message


@pytest.mark.parametrize("in_collective", some([0, 1], always=[1]))
def test_workers_that_wait_for_one_another(in_collective, monkeypatch):
    monkeypatch.setenv("TFDIST_STALL_WARNING", "1")
    ranks = Ranks(2)
    try:
        told = ranks.run(f"{FAULTS}:waits_that_cross", in_collective)
    finally:
        ranks.stop()
    assert told[1 - in_collective].startswith("ProgramMismatchError: ")
    for message in told:
        assert "The workers wait for one another: worker " in message
        assert ", in fit (" in message
        assert "in the exchange 'call', which " in message
        assert f"worker {in_collective} (" in message and " in all_gather " in message


def test_a_process_stays_in_its_group():
    for message in GROUPS["2"].run(f"{FAULTS}:another_member"):
        assert message.startswith("ClusterError: ")
        assert "Start a new process" in message


def test_rows_without_batches_are_refused():
    for message in GROUPS["2"].run(f"{FAULTS}:not_batched"):
        assert message.startswith("ValueError: ")
        assert "Call `.batch(global_batch_size)`" in message


def test_tensors_are_not_sent_in_the_clear_where_tls_is_set():
    group = Ranks(2, native=False, tls=True)
    answers = group.answers(f"{FAULTS}:different_models")
    group.stop()
    for done, message in answers:
        assert not done
        last = message.strip().splitlines()[-1]
        assert "TLS is set, and TensorFlow's collectives send tensors in the clear." in last
        assert "switched off by TFDIST_NATIVE=0" in last


def test_wrong_arguments_are_refused():
    (smoke,) = GROUPS["1"].run(f"{FAULTS}:wrong_arguments")[0]
    assert "'smoke'" in smoke


def test_native_collectives_that_cannot_be_had():
    for message in GROUPS["2 by TensorFlow"].run(f"{FAULTS}:native_wanted"):
        assert message.startswith("NativeUnavailableError: The native collectives are switched off")


@exhaustive
def test_a_second_strategy():
    for (losses, weights), (other_losses, other_weights) in GROUPS["2"].run(f"{FAULTS}:made_again"):
        assert losses == other_losses
        assert all(map(np.array_equal, weights, other_weights))


@exhaustive
@pytest.mark.parametrize("communication", ["auto", "tensorflow"])
def test_tensorflow_used_before_the_strategy(tmp_path, communication):
    script = tmp_path / "train.py"
    script.write_text(
        "import tensorflow as tf\n"
        "tf.constant(1)\n"
        "import tfdist\n"
        f"tfdist.MultiWorkerMirroredStrategy(communication={communication!r})\n"
    )
    command = [sys.executable, "-m", "tfdist", "run", "-n", "2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=240, env=environment
    )
    # Only TensorFlow's own collectives have to be first.
    assert result.returncode == (communication == "tensorflow")
    refused = "UnsupportedError: TensorFlow ran an operation before the strategy" in result.stderr
    assert refused == (communication == "tensorflow")


@exhaustive
def test_another_backend_is_refused():
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    code = "import keras, tfdist\nkeras.backend.backend = lambda: 'jax'\ntfdist.MirroredStrategy"
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert "KERAS_BACKEND='jax'" in result.stderr


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("layers_outside_of_the_scope", "dense/kernel' was created outside"),
        ("optimizer_outside_of_the_scope", "ValueError: The optimizer 'adam' was created outside"),
        ("model_outside_of_the_scope", "ValueError: `fit` requires a model created in the scope"),
        ("different_epochs", "ProgramMismatchError: "),
        ("the_chief_evaluates", "ProgramMismatchError: "),
    ],
)
def test_calls_are_checked(fault, said):
    for message in GROUPS["2"].run(f"{FAULTS}:{fault}"):
        assert said in message


def test_workers_with_other_seeds():
    (losses, weights, said), (other_losses, other_weights, also_said) = GROUPS["2"].run(
        f"{FAULTS}:different_seeds"
    )
    assert losses == other_losses
    assert all(map(np.array_equal, weights, other_weights))
    assert said == also_said
    assert said.startswith("ProgramMismatchError: The workers read different data: ")
    assert "x of float32[24, 8] in the first batch" in said and "other values" in said
