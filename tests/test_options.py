"""Settings from the environment."""

import pytest

from tfdist.options import Options


def test_each_variable():
    read = Options.from_environment(
        {
            "TFDIST_START_TIMEOUT": "1",
            "TFDIST_COLLECTIVE_TIMEOUT": "2.5",
            "TFDIST_HEARTBEAT_TIMEOUT": "3",
            "TFDIST_SECRET": "12 hush",
            "TFDIST_HOST": "7",
        }
    )
    assert read == Options(
        start_timeout=1.0,
        collective_timeout=2.5,
        heartbeat_timeout=3.0,
        secret="12 hush",
        host="7",
    )


def test_unset_and_empty_variables():
    assert Options.from_environment({"TFDIST_SECRET": "", "TFDIST_START_TIMEOUT": ""}) == Options()
    assert (Options().secret, Options().host) == ("", "")


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan"])
def test_invalid_seconds(text):
    with pytest.raises(ValueError, match=r"TFDIST_START_TIMEOUT must be .* Received: "):
        Options.from_environment({"TFDIST_START_TIMEOUT": text})


def test_the_secret_is_not_shown():
    options = Options(secret="hush")
    assert "hush" not in f"{options!r} {options}"
