"""One worker is a special case of several: the same results and errors for any number of ranks."""

import pytest

from tests.comm.contract import ERRORS, RESULTS
from tests.harness.groups import GROUPS
from tests.harness.tiers import some
from tests.strategy.comparison import assert_close


@pytest.mark.parametrize("traced", some([False, True], always=[False]))
def test_any_number_of_ranks(traced):
    found = {group: GROUPS[group].run("tests.comm.contract:run", traced) for group in "123"}
    for group in found.values():
        for rank, size, results, _, _ in group:
            for name, (_, expected) in RESULTS.items():
                assert_close(results[name], expected(rank, size), f"{name}, {rank} of {size}")
    *_, of_one, handle_of_one = found["1"][0]
    for group in "23":
        for *_, errors, handle in found[group]:
            for name in ERRORS:
                assert not errors[name].startswith("no error"), name
                assert errors[name] == of_one[name], name
            assert [one for one in handle if isinstance(one, str)] == [
                one for one in handle_of_one if isinstance(one, str)
            ]
            assert len(handle) == len(handle_of_one)
