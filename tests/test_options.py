"""Settings from the environment."""

import dataclasses
import pathlib
import re

import pytest

from tests.harness.tiers import some
from tfdist._src.options import (
    InternalVariable,
    LauncherOptions,
    NativeOptions,
    Options,
    Variable,
    xla_processor_limit,
)

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def test_each_variable_is_read():
    read = Options.from_environment(
        {
            "TFDIST_START_TIMEOUT": "1",
            "TFDIST_COLLECTIVE_TIMEOUT": "2.5",
            "TFDIST_HEARTBEAT_TIMEOUT": "3",
            "TFDIST_SECRET": "12 hush",
            "TFDIST_HOST": "7",
            "TFDIST_METRICS_PORT": "9400",
            "TFDIST_METRICS_HOST": "::",
            "TFDIST_LOG_LEVEL": "WARNING",
            "TFDIST_GENERATION": "0",
            "TFDIST_ELASTIC": "1",
        }
    )
    assert read == Options(
        start_timeout=1.0,
        collective_timeout=2.5,
        heartbeat_timeout=3.0,
        secret="12 hush",
        host="7",
        metrics_port=9400,
        metrics_host="::",
        log_level="warning",
        launcher=LauncherOptions(elastic=True),
    )


def test_unset_and_empty_variables():
    assert Options.from_environment({"TFDIST_SECRET": "", "TFDIST_START_TIMEOUT": ""}) == Options()
    assert (Options().secret, Options().host) == ("", "")


@pytest.mark.parametrize("text", some(["soon", "-1", "0", "nan"], always=["soon", "-1", "nan"]))
def test_invalid_seconds_are_refused(text):
    with pytest.raises(ValueError, match=r"TFDIST_START_TIMEOUT must be .* Received: "):
        Options.from_environment({"TFDIST_START_TIMEOUT": text})


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", ["on", "0", "65536", "-1", "9400.0"])
def test_invalid_ports_are_refused(text):
    with pytest.raises(ValueError, match=r"TFDIST_METRICS_PORT must be a port .* Received: "):
        Options.from_environment({"TFDIST_METRICS_PORT": text})


@pytest.mark.exhaustive
def test_the_generation_is_read_and_checked():
    assert Options.from_environment({"TFDIST_GENERATION": "3"}).launcher.generation == 3
    with pytest.raises(ValueError, match=r"TFDIST_GENERATION must be .* Received: '-1'"):
        Options.from_environment({"TFDIST_GENERATION": "-1"})


@pytest.mark.exhaustive
def test_switches_are_0_or_1():
    assert not Options.from_environment({"TFDIST_ELASTIC": "0"}).launcher.elastic
    with pytest.raises(ValueError, match=r"TFDIST_ELASTIC must be 0 or 1. Received: 'yes'"):
        Options.from_environment({"TFDIST_ELASTIC": "yes"})


@pytest.mark.exhaustive
def test_settings_of_gpus_are_checked():
    read = Options.from_environment(
        {"TFDIST_DEVICE_ALGORITHM": "p2p", "TFDIST_DEVICE_BUFFERS": "4096"}
    )
    assert (read.device_algorithm, read.device_buffers) == ("p2p", 4096)
    with pytest.raises(
        ValueError, match=r"TFDIST_DEVICE_ALGORITHM must be one of p2p, nccl, host, by_size"
    ):
        Options.from_environment({"TFDIST_DEVICE_ALGORITHM": "smoke"})
    for text in ("16", "5000", "4M"):
        with pytest.raises(ValueError, match=r"TFDIST_DEVICE_BUFFERS must be .* Received: "):
            Options.from_environment({"TFDIST_DEVICE_BUFFERS": text})
    tls = {f"TFDIST_TLS_{name}": "a.pem" for name in ("CERTIFICATE", "KEY", "CA")}
    with pytest.raises(ValueError, match="in the clear, and TLS is set"):
        Options.from_environment({"TFDIST_DEVICE_ALGORITHM": "nccl", **tls})


def test_xla_can_be_switched_off():
    assert Options().xla and not Options.from_environment({"TFDIST_XLA": "0"}).xla
    assert xla_processor_limit({"XLA_FLAGS": "--a=1 --xla_cpu_max_isa=AVX2"}).endswith("=AVX2")
    assert xla_processor_limit({}) == ""


def names_in(*classes):
    return {name for one in classes for key, name in vars(one).items() if key.isupper()}


def test_each_setting_has_a_name_and_is_documented():
    """Each setting has a name, and the documentation describes each name."""
    users, internal = names_in(Variable), names_in(InternalVariable)
    assert all(re.fullmatch(r"TFDIST_[A-Z_]+", name) for name in users | internal)
    settings = {f"TFDIST_{field.name.upper()}" for field in dataclasses.fields(Options)}
    assert settings - {"TFDIST_LAUNCHER"} < users
    assert {f"TFDIST_{f.name.upper()}" for f in dataclasses.fields(LauncherOptions)} < internal
    assert not users & internal
    documented = set(re.findall(r"\bTFDIST_[A-Z_]+\b", (DOCS / "guide/settings.md").read_text()))
    assert documented == users | internal - {InternalVariable.SPARK_ROWS}


@pytest.mark.parametrize(
    ("variable", "valid"),
    [
        ("TFDIST_LOG_LEVEL", "debug, info, warning, error"),
        ("TFDIST_ALGORITHM", "auto, shm, one_shot, two_shot, ring, hierarchical"),
        ("TFDIST_VECTOR_UNIT", "baseline, avx2, avx512"),
        ("TFDIST_SAVE", "all, chief"),
    ],
)
def test_a_choice_names_the_valid_ones(variable, valid):
    read = NativeOptions if variable == "TFDIST_VECTOR_UNIT" else Options
    with pytest.raises(ValueError, match=f"{variable} must be one of {valid}. Received: 'loud'"):
        read.from_environment({variable: "loud"})


def test_the_secret_is_not_shown():
    options = Options(secret="hush")
    assert "hush" not in f"{options!r} {options}"
