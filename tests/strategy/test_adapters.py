"""Low-rank adapters and quantized layers give the result of one process."""

from __future__ import annotations

import pytest

from tests.harness.groups import GROUPS
from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import PACKAGE, check_same_as_alone


@exhaustive
@pytest.mark.parametrize("behaviour", ["lora", "quantized"])
def test_two_workers_give_the_result_of_one_process(behaviour):
    check_same_as_alone("2", f"adapters:{behaviour}")


@exhaustive
def test_what_is_trained_and_quantized():
    """Or the comparison above would say nothing."""
    adapted = reference(f"{PACKAGE}.adapters:lora")
    assert adapted["trained"][:3] == ["bias", "lora_kernel_a", "lora_kernel_b"]
    assert adapted["moved"]
    assert "int8" in reference(f"{PACKAGE}.adapters:quantized")["kinds"]


@exhaustive
def test_adapters_made_outside_the_scope_are_refused():
    for message in GROUPS["2"].run(f"{PACKAGE}.adapters:lora_outside"):
        assert message.startswith("ValueError: The variable ")
        assert "lora_kernel_a' was created outside the scope" in message
