"""What the tool says of the scripts that it runs."""

import math

import pytest

from tests.guides.__main__ import _reason_to_skip
from tests.guides.runner import one_line
from tests.guides.table import distance, markdown, row, text


def outcome(*losses, state="ok", error=None):
    logs = [["fit", {"loss": list(losses)}]] if losses else []
    return {"state": state, "error": error, "logs": logs}


@pytest.mark.parametrize(
    ("outcomes", "end"),
    [
        ([outcome(1.0), outcome(1.0), outcome(1.0005)], ("yes", "")),
        (
            [outcome(1.0), outcome(1.0), outcome(1.5)],
            ("no", "by 0e+00 with one worker, 5e-01 with two"),
        ),
        ([outcome(), outcome(), outcome()], ("no `fit`", "")),
        (
            [outcome(2.0), outcome(2.0), outcome(state="error", error="ValueError: No. Do this.")],
            ("-", "ValueError: No"),
        ),
    ],
)
def test_a_row_has_the_states_and_a_verdict(outcomes, end):
    assert row("a/b", outcomes) == ("a/b", *(o["state"] for o in outcomes), *end)


def test_what_rounding_changes_is_noted():
    outcomes = [outcome(1.0), outcome(1.0), outcome(2.0), outcome(4.0)]
    assert row("a", outcomes)[-1].endswith("; rounded weights change one process by 3e+00")


def test_the_distance_of_unlike_results_is_infinite():
    assert distance([1.0, {"a": 2.0}], [1.0, {"a": 2.0}]) == 0
    assert distance([1.0], [1.0, 1.0]) == math.inf
    assert distance([math.nan], [math.nan]) == 0
    assert distance([1.0], [math.nan]) == math.inf


def test_tables_are_written_as_markdown_and_text():
    rows = [row("a|b", [outcome(1.0)] * 3)]
    assert "a\\|b" in markdown(rows)
    assert text(rows).splitlines()[1].split() == ["a|b", "ok", "ok", "ok", "yes"]


def test_a_script_that_needs_what_is_not_here(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import keras\nfrom no_such_package.part import thing\nimport tqdm\n")
    assert _reason_to_skip(script) == "needs no_such_package"


def test_a_script_that_is_not_python(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import keras\nkeras.Model(\n")
    assert _reason_to_skip(script).startswith("is not Python: ")


def test_an_error_on_one_line():
    error = ValueError("Exception encountered when calling A.call().\n\n\x1b[1mToo small.\x1b[0m\n")
    assert one_line(error) == "ValueError: Too small."
