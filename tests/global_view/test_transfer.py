"""The report of what a step communicates."""

from __future__ import annotations

import re
from pathlib import Path

import tfdist._src.global_view
from tfdist._src.global_view.transfer import REMEDIES, Transfer, report


def test_the_report_lists_and_adds_up_transfers():
    assert "nothing but the number of rows" in report([])
    found = [
        Transfer("reduce", "MatMul", 2048, (16, 32), "dense/MatMul", "", 4),
        Transfer("gather", "MatMul", None, (None, 8), "train.py:4", "pairs of rows", 4),
        Transfer("gather", "moments", 512, (2, 64), "norm", "statistics of each replica", 4),
        Transfer("gather", "Lookup", None, (None,), "lookup", "no rule"),
    ]
    assert report(found).splitlines() == [
        "The step reduces 2.0 KiB and gathers 512 B, besides 2 values of unknown size:",
        "  reduce 2.0 KiB [16x32] for MatMul at dense/MatMul",
        # The order of the lines assumes 32 rows.
        "  gather unknown size [?x8] for MatMul at train.py:4 (pairs of rows)",
        "  gather 512 B [2x64] for moments at norm (statistics of each replica)",
        "  gather unknown size [?] for Lookup at lookup (no rule)",
        f"To gather less (pairs of rows): {REMEDIES['pairs of rows']}",
        f"To gather less (no rule): {REMEDIES['no rule']}",
    ]
    assert found[1].estimate() == 32 * 8 * 4
    assert found[1].estimate(5) == 5 * 8 * 4
    # Each reason that a rule gives has a remedy, or needs none.
    files = Path(tfdist._src.global_view.__file__).parent.rglob("*.py")
    source = "\n".join(file.read_text() for file in files)
    given = re.findall(r'(?:\.whole\(|(?<!, )reason = |reason=|why: str = )"([^"]+)"', source)
    for one, other in re.findall(r'whole\("(.+)" if .+ else "(.+)"\)', source):
        given += [one, other]
    assert {"pairs of rows", "printed", "no rule", "rows are coupled"} < set(given)
    assert set(given) <= set(REMEDIES)
