"""Which collectives are chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tensorflow as tf

from tests.harness.tiers import exhaustive
from tfdist._src.options import Options
from tfdist._src.strategy import communication

pytestmark = exhaustive


@pytest.mark.parametrize(("chosen", "expected"), [("auto", "tensorflow"), ("native", "native")])
def test_gpus_of_other_makers(monkeypatch, capfd, chosen, expected):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    group = SimpleNamespace(
        options=Options(cuda_library="/none/libcuda.so.1"),
        topology=SimpleNamespace(size=2, rank=0),
        elastic=False,
        agree=lambda what, own: None,
        exchange=lambda what, own: [own, own],
    )
    assert communication.choose(group, chosen) == expected
    _, said = capfd.readouterr()
    reason = "The native collectives work on NVIDIA's GPUs only (no GPU: /none/libcuda.so.1: "
    assert (reason in said) == (expected == "tensorflow")
    assert "slower" not in said
