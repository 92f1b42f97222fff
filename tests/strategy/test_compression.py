"""Training with compressed gradients: close to the exact one, and equal on all workers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tfdist
from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import PACKAGE, assert_equal, functions
from tfdist._src.compression.policy import read
from tfdist.compression import CODECS, Auto, Int8, Policy

MODULES = ("compressed", "compressed_changes", "compressed_files")
VOTES = ("signsgd", "signum")


def run(group, behaviour, *args):
    module = next(name for name in MODULES if behaviour in functions(name))
    return GROUPS[group].run(f"{PACKAGE}.{module}:{behaviour}", *args)


def check_equal(results):
    for rank, result in enumerate(results):
        assert_equal(result["weights"], results[0]["weights"], f"rank {rank}")


@pytest.fixture(scope="module")
def exact():
    return run("2", "exact")[0]["history"]["loss"]


@exhaustive
@pytest.mark.parametrize("name", [n for n in CODECS if n not in VOTES])
def test_loss_falls_as_without(exact, name):
    results = run("2", "every_codec", name)
    check_equal(results)
    loss = results[0]["history"]["loss"]
    assert loss[-1] == pytest.approx(exact[-1], rel=0.02)


@exhaustive
@pytest.mark.parametrize("name", VOTES)
def test_votes_move_weights_by_whole_learning_rates(name):
    """Each of the 24 steps moves a matrix's weight by the learning rate of 0.01, or not at all."""
    results = run("2", "every_codec", name)
    check_equal(results)
    pairs = zip(results[0]["before"], results[0]["weights"], strict=True)
    for before, after in [pair for pair in pairs if pair[0].ndim > 1]:
        steps = (after - before) / 0.01
        np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)
        assert 0 < np.abs(steps).max() < 24.5
    loss = results[0]["history"]["loss"]
    assert loss == sorted(loss, reverse=True)


@exhaustive
@pytest.mark.parametrize("name", CODECS)
def test_sequences_are_trained_with_compressed_gradients(name):
    results = run("2", "sequences", name)
    check_equal(results)
    loss = results[0]["history"]["loss"]
    assert np.isfinite(loss).all() and (name in VOTES or loss[-1] < loss[0])


@exhaustive
def test_three_workers_train_close_to_exact_gradients(exact):
    results = run("3", "every_codec", "onebit")
    check_equal(results)
    assert results[0]["history"]["loss"][-1] == pytest.approx(exact[-1], rel=0.02)


GROUPS_OF_HOSTS = ["2", "2 hosts", "4 on 2 hosts"]


@pytest.mark.parametrize("group", some(GROUPS_OF_HOSTS, always=["2"]))
def test_a_codec_of_the_user(exact, group):
    results = run(group, "codec_of_the_user", group == "2")
    check_equal(results)
    assert results[0]["history"]["loss"][-1] == pytest.approx(exact[-1], rel=0.02)
    assert any(error.any() for result in results for error in result["errors"])


@exhaustive
def test_a_warmup_is_exact(exact):
    for result in run("2", "warmup", 1000):
        np.testing.assert_allclose(result["history"]["loss"], exact, rtol=1e-5)
        assert not any(error.any() for error in result["errors"])
    for result in run("2", "warmup", 6):
        np.testing.assert_allclose(result["history"]["loss"][0], exact[0], rtol=1e-5)
        assert all(error.any() for error in result["errors"])


def test_what_is_excluded_is_exact(exact):
    for result in run("2", "excluded"):
        np.testing.assert_allclose(result["history"]["loss"], exact, rtol=1e-5)
        assert result["errors"] == []


@exhaustive
@pytest.mark.parametrize("compressed", [False, True])
def test_sparse_gradients_are_exact_unless_asked(compressed):
    results = run("2", "sparse", compressed)
    check_equal(results)
    sizes = sorted(error.size for error in results[0]["errors"])
    assert sizes == ([8 * 3, 50 * 8] if compressed else [8 * 3])
    loss = results[0]["history"]["loss"]
    assert loss[-1] < loss[0]


@exhaustive
def test_in_ways_of_keras():
    results = run("2", "in_ways_of_keras")
    for name in results[0]:
        check_equal([result[name][0] for result in results])
        compressed, plain = (outcome["history"]["loss"] for outcome in results[0][name])
        np.testing.assert_allclose(compressed, plain, rtol=0.02, err_msg=name)
        assert compressed != plain, name


@exhaustive
def test_overflow_on_one_worker():
    for result in run("2", "overflow_on_one_worker"):
        assert result["unchanged"]
        assert result["scale"] == 2.0**99
        assert not any(error.any() for error in result["errors"])


def test_a_custom_loop_is_compressed():
    results = run("2", "custom_loop")
    check_equal(results)
    losses = results[0]["losses"]
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    assert all(error.any() for error in results[0]["errors"])


@exhaustive
def test_checkpoints_hold_weights_and_errors(tmp_path):
    for whole, again, errors, errors_again in run("2", "checkpoint", str(tmp_path)):
        assert all(map(np.array_equal, whole, again))
        assert all(map(np.array_equal, errors, errors_again))


@exhaustive
def test_overflow_where_a_worker_has_no_rows():
    for result in run("2", "overflow_without_rows"):
        assert result == {"unchanged": True, "scale": 2.0**119}


@exhaustive
def test_what_is_kept_stays_with_its_variable():
    for unchanged, same_numbers in run("2", "other_policies"):
        assert same_numbers
        assert unchanged == {0: True, 1: False}


@exhaustive
@pytest.mark.parametrize("group", ["2 hosts", "4 on 2 hosts"])
def test_what_is_kept_goes_on_to_the_next_codec(group):
    carried = set()
    for errors, numbers in run(group, "handed_over"):
        assert set(errors) == numbers
        assert all(change == (True, False) for change in errors.values())
        carried |= numbers
    assert carried == {0, 1}


@exhaustive
def test_a_schedule_has_no_memory():
    for names, as_given in run("2", "schedule_again"):
        assert names == ["int8", "onebit"] * 2
        assert as_given


@exhaustive
def test_keras_list_of_callbacks():
    assert run("2 hosts", "callback_list") == [1, 1]


@exhaustive
def test_checkpoint_of_the_chief(tmp_path):
    (_, chiefs), (own, other) = run("2", "checkpoint_of_the_chief", str(tmp_path))
    assert chiefs and own and not other


@pytest.mark.parametrize(
    ("behaviour", "arguments"),
    some(
        [
            ("resumed_from_files", ("keras",)),
            ("resumed_from_files", ("weights.h5",)),
            ("resumed_from_backup", ()),
        ],
        always=[],
    ),
)
def test_resumes_from_files(tmp_path, behaviour, arguments):
    results = run("2", behaviour, str(tmp_path), *arguments)
    for whole, again, errors, errors_again in results:
        assert all(map(np.array_equal, whole, again))
        assert all(error.any() for error in errors)
        assert all(map(np.array_equal, errors, errors_again))


@exhaustive
def test_resumes_without_what_was_kept(tmp_path):
    for said, unchanged in run("2", "resumed_without", str(tmp_path)):
        assert "belongs to other weights" in said[0] and "does not exist" in said[1]
        assert unchanged


@exhaustive
@pytest.mark.parametrize(
    ("name", "group"),
    list(
        itertools.product(
            ["onebit", "topk", "powersgd", "randomk"], ["3 on 2 hosts", "4 on 2 hosts"]
        )
    ),
)
def test_hosts_of_several_workers(exact, group, name):
    results = run(group, "from_host_to_host", name)
    check_equal(results)
    assert results[0]["history"]["loss"][-1] == pytest.approx(exact[-1], rel=0.02)
    for result in results:
        assert result["sent"] <= result["in_all"]
    # A group of one worker per host carries gradients, so not all goes by that of all workers.
    assert results[0]["in_all"] > results[0]["of_workers"]


@exhaustive
@pytest.mark.parametrize("name", ["onebit", "topk", "powersgd"])
def test_several_devices_train_close_to_exact_gradients(exact, name):
    results = run("2x2", "every_codec", name)
    check_equal(results)
    assert results[0]["history"]["loss"][-1] == pytest.approx(exact[-1], rel=0.02)


@exhaustive
def test_several_devices_eagerly():
    assert all("run_eagerly=False" in message for message in run("2x2", "eagerly"))


@exhaustive
def test_a_schedule_changes_the_codec_by_epoch(exact):
    results = run("2", "scheduled")
    check_equal(results)
    for result in results:
        assert result["names"] == ["none", "onebit", "topk", "topk", "none"]
        np.testing.assert_allclose(result["history"]["loss"][0], exact[0], rtol=1e-5)
        assert result["history"]["loss"][3] == pytest.approx(exact[3], rel=0.02)
        assert all(error.any() for error in result["kept"][1])
        # What the last codec has left is kept, but used no more.
        assert all(map(np.array_equal, result["kept"][3], result["kept"][4]))


def test_different_schedules_are_refused_on_all_workers():
    for message in run("2", "scheduled_differently"):
        assert "CompressionSchedule" in message and "Int8" in message and "OneBit" in message


def test_wrong_schedules_are_refused():
    for schedule in ({-1: None}, {"1": None}, {0: "int9"}):
        with pytest.raises(ValueError, match="Received"):
            tfdist.callbacks.CompressionSchedule(schedule)


@exhaustive
def test_auto_chooses_the_same_fast_codec_on_all_workers(exact):
    candidates = ("int8", "onebit", "topk", "powersgd")
    results = run("2 hosts", "chosen_by_measurement", candidates)
    check_equal(results)
    for result in results:
        # On a slow link a candidate is skipped whose bytes alone take too long.
        assert {"none"} <= set(result["seconds"]) <= {"none", *candidates}
        assert result["seconds"] == results[0]["seconds"]
        assert result["chosen"] == results[0]["chosen"]
        assert result["chosen"] == "none" or (
            result["seconds"][result["chosen"]] <= 1.1 * min(result["seconds"].values())
        )
        assert result["again"] == results[0]["again"]
        # Which codec it is depends on the machine, and how much is lost on the codec.
        assert result["history"]["loss"][-1] == pytest.approx(exact[-1], rel=0.2)


def test_auto_on_one_machine():
    (said, chosen), (nothing, others) = run("2", "auto_on_one_machine")
    assert "chose none, since all workers are on one host" in said[0]
    assert (nothing, chosen, others) == ([], "none", "none")


@exhaustive
def test_auto_follows_the_links():
    results = run("2 hosts", "links_that_change")
    check_equal(results)
    for result in results:
        assert result["names"] == ["none", "none", "onebit", "onebit"]
        assert all(error.any() for error in result["errors"])


@pytest.mark.parametrize("candidates", ["int8", ("int8",), Int8()])
def test_wrong_candidates_are_refused(candidates):
    with pytest.raises(ValueError, match="`candidates` must be a tuple of codecs"):
        Auto(candidates)


@exhaustive
@pytest.mark.parametrize("name", [n for n in CODECS if n != "threshold"])
def test_bytes_on_the_wire(name):
    """The core counts what the codec's formula says, there and back."""
    codec = CODECS[name]()
    for sent in run("2 hosts", "bytes_on_the_wire", name):
        saved = sent["exact"] - sent[name]
        bits = codec.bits_per_value((512, 512))
        back = 2 + 32 / codec._encoding.block if name in VOTES else bits
        # Half of the kernel's gradient goes to the other worker, and half of the sums; or all.
        sends = 2 * bits if codec._payload == "gathered" else bits + back
        expected = 512 * 512 * (32 - sends / 2) / 8
        assert saved == pytest.approx(expected, rel=0.01)


def test_an_optimizer_that_is_not_built():
    for compressed, plain in run("2", "applied_before_it_is_built"):
        assert compressed == plain
        assert "must already be built" in compressed


def test_different_codecs_are_refused_on_all_workers():
    for message in run("2", "different_codecs"):
        assert "compression" in message and "Int8" in message and "OneBit" in message


def test_alone_nothing_is_compressed():
    strategy = tfdist.MultiWorkerMirroredStrategy(compression="int8")
    assert strategy.extended.compressor is None


def test_what_may_be_passed():
    assert read(None) is None
    assert read("auto") == read(Auto()) == Policy(Auto())
    assert read("int8") == read(Int8()) == read(Policy(Int8())) == Policy(Int8())
    for wrong in ("int9", 8, Int8, ["int8"], np.zeros(3), {}):
        with pytest.raises(ValueError, match="`compression` must be one of 'fp16'"):
            read(wrong)


@pytest.mark.parametrize("codec", [None, "int8", Int8])
def test_a_policy_holds_a_codec(codec):
    with pytest.raises(ValueError, match="`codec` must be a codec such as"):
        Policy(codec)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"exclude": "kernel"}, "tuple of regular expressions"),
        ({"exclude": ("(",)}, "regular expressions"),
        ({"exclude": ("a", 3)}, "tuple of regular expressions"),
        ({"smallest": -1}, "`smallest` must be >= 0"),
        ({"smallest": "a"}, "Policy: `smallest` must be of type int"),
        ({"within_hosts": "no"}, "`within_hosts` must be of type bool"),
        ({"warmup_steps": -1}, "`warmup_steps` must be >= 0"),
    ],
)
def test_wrong_policies_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Policy(Int8(), **settings)
