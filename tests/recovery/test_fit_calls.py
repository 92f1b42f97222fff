"""Who may join in a call of `fit`."""

import json

import pytest

from tfdist._src.recovery.fit_calls import FitCalls


def request(call, description="fit"):
    return json.dumps({"call": call, "description": description})


def test_requests_are_judged():
    calls = FitCalls()
    calls.begin()
    calls.end(None)
    calls.begin()
    assert json.loads(calls.judge(request(1))) == {"ended": {"epoch": [], "history": {}}}
    assert calls.judge(request(2)) == ""
    calls._description = "fit"
    assert calls.judge(request(2)) is None
    assert json.loads(calls.judge(request(2, "other"))) == {"description": "fit"}
    assert calls.judge(request(3)) == ""


def test_malformed_requests_are_told_from_others():
    calls = FitCalls()
    calls.begin()
    for wrong in (request(-5), request(0), request(0.5), request("1"), request(None), "{", "[]",
                  "3", "{}", '{"call": 1}', request(True)):  # fmt: skip
        with pytest.raises(ValueError):
            calls.judge(wrong)
