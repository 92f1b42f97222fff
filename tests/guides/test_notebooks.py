"""The runner of notebooks, and what it says of cells."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.guides.cells import cells, makes_strategy
from tests.guides.notebooks import compare
from tests.guides.outcomes import REMEDY, to_scope, verdict
from tests.harness.tiers import exhaustive
from tfdist._src.keras.fit import call_checks

ROOT = Path(__file__).parents[2]

REFUSAL = f"ValueError: Create it inside `{REMEDY}`."
TINY = (
    "import keras\nimport numpy as np\nimport tensorflow as tf\n%load_ext tensorboard",
    "strategy = tf.distribute.MirroredStrategy()",
    """with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.arange(24, dtype="float32").reshape(6, 4) / 24
model.fit(x, x[:, :1], batch_size=3, verbose=0)""",
    "model.save('model.keras')\nloaded = keras.models.load_model('model.keras')",
    "loaded.fit(x, x[:, :1], batch_size=3, verbose=0)",
    "print('Replicas:', strategy.extended._num_replicas_in_sync)",
    "undefined",
)


def notebook(folder, *sources):
    path = folder / "tiny.ipynb"
    found = [{"cell_type": "code", "source": [source]} for source in sources]
    text = [{"cell_type": "markdown", "source": ["# Text"]}]
    path.write_text(json.dumps({"cells": text + found}))
    return path


def outcome(source="", error="", logs=(), printed="", models=()):
    made = {"logs": [list(log) for log in logs], "models": list(models)}
    return {"source": source, "error": error, "printed": printed, **made}


def fit(*losses):
    return outcome(logs=[("fit", {"loss": list(losses)})])


@exhaustive
def test_a_tiny_notebook(tmp_path):
    lines, different = compare(notebook(tmp_path, *TINY), timeout=300)
    said = [line.partition(": ")[2] for line in lines]
    assert different == 2, lines  # The cell that prints the number of replicas, on both.
    assert lines[-1].endswith(f"`{REMEDY}` around the cells [3]")
    for worker in (said[:7], said[7:14]):
        assert worker[:4] == ["same"] * 4
        assert worker[4].startswith("refused: ValueError: `fit` requires a model created in the")
        assert worker[4].endswith(f"\n    with `{REMEDY}`: same")
        assert worker[5] == "differs: prints 'Replicas: 2' instead of 'Replicas: 1'"
        assert worker[6].startswith("does not run in one process: NameError: name 'undefined'")


@pytest.mark.parametrize(
    ("alone", "worker", "rounded", "said"),
    [
        (fit(1.0), fit(1.00001), fit(1.0), "same"),
        (fit(1.0), fit(1.01), fit(1.01), "same to rounding"),
        (fit(1.0), fit(1.5), fit(1.01), "differs: fit gives {'loss': [1.5]} instead of"),
        (fit(1.0), fit(1.0, 2.0), fit(1.0), "differs: fit gives"),
        (fit(1.0), outcome(), fit(1.0), "differs: 0 calls instead of 1"),
        (outcome(), outcome(error="ValueError: No."), outcome(), "differs: ValueError: No."),
        (outcome(), outcome(error=REFUSAL), outcome(), f"differs: {REFUSAL}"),
        (
            outcome(error="NameError: a"),
            outcome(error="NameError: a"),
            outcome(),
            "does not run in one process: NameError: a",
        ),
        (
            outcome(error="NameError: a"),
            outcome(),
            outcome(),
            "does not run in one process: NameError: a; on workers: it runs",
        ),
        (
            outcome(printed="Loss: 1.25 in tmp1234abcd"),
            outcome(printed="Loss: 1.26 in tmpabcd1234"),
            outcome(printed="Loss: 1.25 in tmp1234abcd"),
            "differs: prints 'Loss: 1.26",
        ),
        (
            outcome(printed="[1, 2]"),
            outcome(printed="[1]"),
            outcome(printed="[1, 2]"),
            "same, but prints '[1]' and not '[1, 2]'",
        ),
    ],
)
def test_verdicts_compare_a_worker_with_one_process(alone, worker, rounded, said):
    found = verdict(alone, worker, rounded)
    assert found == said or (said != "same" and found.startswith(said))


def test_a_refusal_that_the_cell_catches_is_found():
    alone = outcome(logs=[("fit", {"error": "RuntimeError: Interruption"})])
    worker = outcome(logs=[("fit", {"error": REFUSAL})])
    assert verdict(alone, worker, alone) == f"differs: {REFUSAL}"


def test_the_cell_that_creates_a_refused_model_is_to_run_in_the_scope():
    made = [outcome("a = load()", models=["a"]), outcome("b = load()", models=["b"])]
    alone = [*made, outcome("a.fit()")]
    assert to_scope(alone, [*made, outcome("a.fit()", error=REFUSAL)]) == [0]
    assert to_scope(alone, [*made, outcome("load().fit()", error=REFUSAL)]) == [2]
    assert to_scope(alone, alone) == []


def test_shell_commands_in_cells_are_left_out(tmp_path):
    made = notebook(
        tmp_path,
        "!pip install keras\n%load_ext a\nif x:\n  !ls\nx = 1",
        "%%bash\nls",
        "%%bash --bg\npython main.py &> job_0.log",
        "%%bash\npython main.py",
        "%%writefile main.py\nx = 1",
        "os.environ['TF_CONFIG'] = json.dumps(config)\nos.environ.pop('TF_CONFIG', None)",
        "batch = 64 * strategy.num_replicas_in_sync\npath = '/tmp/keras-model'",
    )
    assert cells(made, Path("/folder")) == [
        "pass\npass\nif x:\n  pass\nx = 1",
        "pass",
        "pass",
        "import runpy\nrunpy.run_path('main.py', run_name='__main__')",
        "open('main.py', 'w').write('x = 1')",
        "pass\npass",
        "batch = 64 * 2\npath = '/folder/keras-model.keras'",
    ]


def test_a_notebook_without_a_strategy_is_recognized():
    assert makes_strategy(["s = tf.distribute.MultiWorkerMirroredStrategy()"])
    assert not makes_strategy(["with tf.distribute.OneDeviceStrategy('CPU:0').scope():"])


def test_the_migration_page_lists_the_line_that_a_refusal_names(monkeypatch):
    group = SimpleNamespace(topology=SimpleNamespace(size=2))
    monkeypatch.setattr(call_checks, "joined_group", lambda: group)
    monkeypatch.setattr(call_checks, "made_under", lambda model: None)
    with pytest.raises(ValueError, match="Create or load it inside") as refusal:
        call_checks._refuse_outside(SimpleNamespace(name="loaded"), "fit")
    assert f"`{REMEDY}`" in str(refusal.value)
    page = (ROOT / "docs/guide/migrating.md").read_text()
    assert f"`{REMEDY}`" in page.partition("### Refused")[2].partition("\n#")[0]
