"""What is noted and said about the values that training steps communicate."""

from __future__ import annotations

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import PACKAGE


@exhaustive
def test_a_step_that_gathers_more_than_it_reduces_says_so_once():
    first, second = GROUPS["2"].run(f"{PACKAGE}.traffic:said_and_noted")
    counts, said, noted, changes = first
    assert counts == {"not trained": 0, "trained": 1, "traced again": 1}
    (line,) = said  # None about the mean, whose statistics are small.
    assert line.startswith("A training step of 'compares_rows' gathers 27")
    assert "The largest value has 150.0 KiB, for MatMul at traffic.py:" in line
    assert "(pairs of rows). `strategy.explain(model, batch)` prints all" in line
    # Other workers note the same and say nothing; without a folder there is no flight log.
    assert second[1:] == ([], noted, 0)
    assert changes == 0
    step = noted["compares_rows"]
    assert step["rows"] == 128
    assert step["gathered_bytes"] > step["reduced_bytes"]
    assert step["transfers"][0] == {
        "kind": "gather",
        "operation": "MatMul",
        "bytes": 300 * 128 * 4,
        "shape": [300, 128],
        "where": step["transfers"][0]["where"],
        "reason": "pairs of rows",
    }
    assert noted["traced again"]["rows"] == 128
    assert noted["traced again"]["program"] != step["program"]
    assert noted["a_mean"]["more"] == 0
    assert noted["a_mean"]["gathered_bytes"] < noted["a_mean"]["reduced_bytes"]
