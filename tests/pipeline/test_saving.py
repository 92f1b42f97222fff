"""Saving and loading of models in stages, against one process."""

from __future__ import annotations

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import assert_close

PACKAGE = "tests.pipeline.saving_behaviours"
# Keras does not save the states of dropout, so only these go on as if nothing had happened.
GO_ON = ("gpt_masked_loss", "residual_cnn")


def run(group, name, *args):
    return GROUPS[group].run(f"{PACKAGE}:{name}", *args)


def check(results, reference, where):
    """All ranks give what one process does, and none of them holds it all."""
    for rank, result in enumerate(results):
        result = dict(result)
        assert result.pop("held") < len(reference["weights"])
        assert_close(result, reference, f"{where}, rank {rank}")


@exhaustive
@pytest.mark.parametrize(
    ("name", "optimizer", "saved", "loaded"),
    # The second of the four stages of the last one has nothing to train.
    [
        ("gpt_masked_loss", "adam", "2", "4"),
        ("residual_cnn", "adafactor", "2", "2"),
        ("mlp", "adam", "4", "2"),
    ],
)
def test_the_file_is_an_ordinary_model(name, optimizer, saved, loaded, tmp_path):
    arguments = (name, str(tmp_path), optimizer)
    results = run(saved, "train_and_save", *arguments, int(saved))
    reference = run("alone", "load", *arguments)[0]
    if name in GO_ON:
        check(results, reference, "going on")
    check(run(loaded, "load", *arguments, int(loaded)), reference, "loaded")


@exhaustive
def test_loaded_weights_predict_as_in_one_process(tmp_path):
    arguments = ("gpt_masked_loss", str(tmp_path))
    reference = run("alone", "train_and_save", *arguments)[0]
    predictions = run("alone", "load_weights", *arguments)[0][0]["predictions"]
    for found in run("2", "load_weights", *arguments):
        for part in found:
            assert_close(part["predictions"], predictions, "weights")
            assert part["held"] < len(reference["weights"])


@exhaustive
def test_a_file_of_one_process(tmp_path):
    arguments = ("residual_cnn", str(tmp_path), "nadam")
    reference = run("alone", "train_and_save", *arguments)[0]
    check(run("2", "load", *arguments), reference, "loaded")


@exhaustive
def test_several_pipelines_continue_as_one_process(tmp_path):
    arguments = ("integers", str(tmp_path), "adam")
    results = run("4", "train_and_save", *arguments)
    reference = run("alone", "load", *arguments)[0]
    check(results, reference, "going on")
    check(run("4", "load", *arguments), reference, "loaded")


@exhaustive
def test_scales_of_losses_are_saved_and_loaded(tmp_path):
    arguments = ("mixed_float16_gpt", str(tmp_path), "adam")
    run("2", "train_and_save", *arguments)
    reference = run("alone", "load", *arguments)[0]
    for result in run("2", "load", *arguments):
        assert result["scale"] == reference["scale"] == 8.0 * 2**4  # After four steps.
        assert_close(result["evaluation"], reference["evaluation"], "evaluation", 2e-3)


@exhaustive
def test_exported_models_predict_as_the_pipeline(tmp_path):
    for result in run("2", "export", "residual_cnn", str(tmp_path)):
        assert_close(result["served"], result["predictions"], "served")
        assert result["held"] < 20


def test_summaries_describe_the_model_and_its_stages():
    reference = run("alone", "describe", "mlp")[0]
    for result in run("2", "describe", "mlp"):
        assert result["count"] == reference["count"]
        assert reference["text"] in result["text"]
        assert "sends to later stages" in result["text"]
        # Each of two stages has a share of the cost.
        assert sum(line.count("%  ") for line in result["text"].splitlines()[-2:]) == 2


@exhaustive
def test_callbacks_act_as_in_one_process(tmp_path):
    reference = run("alone", "callbacks", "residual_cnn", str(tmp_path / "alone"))[0]
    assert reference == {"restored": True, "changed": True, "epochs": 2}
    for result in run("2", "callbacks", "residual_cnn", str(tmp_path / "2")):
        assert result == reference


@exhaustive
def test_a_backup_continues_as_in_one_process(tmp_path):
    reference = run("alone", "back_up", "residual_cnn", str(tmp_path / "alone"))[0]
    check(run("2", "back_up", "residual_cnn", str(tmp_path / "2")), reference, "backup")
    assert not list(tmp_path.glob("*/backup"))


@exhaustive
def test_mistakes_in_loading_are_named_and_change_nothing(tmp_path):
    run("alone", "train_and_save", "mlp", str(tmp_path), "adam")
    for messages, unchanged in run("2", "mistakes", str(tmp_path)):
        uncompiled, other_kind, fewer, transposed, other_model = messages
        assert "Call `compile` first" in uncompiled
        assert "without a state for SGD" in other_kind
        assert "13 arrays for the 14 weights" in fewer
        assert "(16, 12) where" in transposed
        assert "model.keras' for 'functional" in other_model
        assert all("\n" not in message for message in messages)
        assert unchanged


@exhaustive
def test_every_rank_reads_what_it_has_saved_into_its_own_folder(tmp_path):
    for read, predictions in run("2", "save_apart", str(tmp_path)):
        for found in read:
            assert_close(found, predictions, "its own folder")


@exhaustive
def test_the_epoch_to_go_on_from_must_be_found_by_all(tmp_path):
    for said in run("2", "restore_apart", str(tmp_path)):
        assert said.startswith("A callback such as BackupAndRestore must find the same files")
        assert "continues from epoch 1 after 2 updates" in said and "from epoch 0 after 2" in said
