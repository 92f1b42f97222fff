"""A training that is interrupted and resumed ends like one that was not, bit for bit."""

from __future__ import annotations

import itertools

import pytest

from tests.groups import GROUPS
from tests.tiers import some

RESUMING = "tests.callbacks.resuming"


def check(group, tmp_path, kind="plain", data="seeded_dataset", at=9, every=4, **options):
    for name in ("undisturbed", "interrupted"):
        (tmp_path / name).mkdir()
    arguments = (kind, str(tmp_path), data, at, every)
    results = GROUPS[group].run(f"{RESUMING}:resume", arguments, options)
    for undisturbed, resumed in results:
        assert undisturbed["weights"] == results[0][0]["weights"]
        assert resumed == undisturbed
        assert undisturbed["left"] == []


@pytest.mark.parametrize(
    ("data", "at"),
    some(
        itertools.product(
            ["seeded_dataset", "arrays", "generator", "repeated", "augmented", "python_generator"],
            [1, 4, 9, 12, 13, "validation"],
        ),
        always=[("seeded_dataset", 9), ("generator", 13)],
    ),
)
def test_every_kind_of_data_goes_on_where_it_was(tmp_path, data, at):
    check("2", tmp_path, data=data, at=at)


@pytest.mark.parametrize("every", some([1, 2, 6, 100, "epoch"], always=["epoch"]))
@pytest.mark.parametrize("group", some(["1", "2", "2x2"], always=["1"]))
def test_snapshots_of_steps_and_of_epochs(tmp_path, group, every):
    check(group, tmp_path, every=every)


@pytest.mark.parametrize(
    "options",
    some(
        [
            {"optimizer": "accumulation"},
            {"optimizer": "ema"},
            {"optimizer": "loss scaling", "policy": "mixed_float16"},
            {"optimizer": "schedule", "rated": False},
            {"steps_per_execution": 2},
            {"run_eagerly": True},
        ],
        always=[{"optimizer": "accumulation"}],
    ),
    ids=lambda options: ", ".join(f"{k} {v}" for k, v in options.items()),
)
@pytest.mark.parametrize("group", some(["2", "3 on 2 hosts", "2 by TensorFlow"], always=["2"]))
def test_every_state_of_optimizers(tmp_path, group, options):
    check(group, tmp_path, **options)


@pytest.mark.parametrize(
    ("kind", "group"),
    some(
        [
            ("sharded", "2"),
            ("sharded", "3"),
            ("int8", "2 hosts"),
            ("topk", "2 hosts"),
            ("powersgd", "3 on 2 hosts"),
        ],
        always=[("sharded", "3"), ("topk", "2 hosts")],
    ),
)
def test_what_each_worker_alone_holds(tmp_path, kind, group):
    check(group, tmp_path, kind=kind)
