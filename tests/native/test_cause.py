"""Why a communicator of the core was aborted, as data, on both ranks of a group in one process."""

from __future__ import annotations

import ctypes
import json
import select
import socket

import numpy as np
import pytest

from tests.harness.deadlines import FAR
from tfdist._src import native
from tfdist._src.native.api import Setup
from tfdist.errors import NativeUnavailableError

NAMES = b"worker 0 (a:1)", b"worker 1 (b:1)"
MESSAGE = "worker 1 (b:1) is lost: no sign of life for 60 s."
FLOAT32, SUM, UNAVAILABLE = 7, 0, 3


@pytest.fixture
def core():
    try:
        return native.load().library
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def ranks(core):
    """For each of two ranks its number, and the socket that gets its news."""
    control, data = socket.socketpair(), socket.socketpair()
    opened = []
    for rank in range(2):
        place = [(ctypes.c_int * 2)(-1, -1) for _ in range(2)]
        for numbers, ends in zip(place, (control, data), strict=True):
            numbers[1 - rank] = ends[rank].detach()
        heard, told = socket.socketpair()
        setup = Setup(
            name=b"causes %d" % rank,
            rank=rank,
            size=2,
            ranks=(ctypes.c_char_p * 2)(*NAMES),
            hosts=(ctypes.c_int * 2)(0, 1),
            control=place[0],
            data=place[1],
            segment=-1,
            silence_warning_seconds=FAR,
            silence_timeout_seconds=FAR,
            stall_seconds=FAR,
            timeout_seconds=FAR,
            start_seconds=FAR,
            algorithm=b"",
            news=told.fileno(),
        )
        number = ctypes.c_int64()
        assert not core.tfd_create(ctypes.byref(setup), ctypes.byref(number)), core.tfd_error()
        told.close()  # The core has a descriptor of its own.
        opened.append((number.value, heard))
    yield opened
    for number, heard in opened:
        core.tfd_close(number)
        heard.close()


def cause(core, number):
    return json.loads(core.tfd_cause(number))


def fail(core, number):
    values = np.zeros(3, np.float32)
    at = values.ctypes.data
    return core.tfd_all_reduce(number, b"x", at, at, values.size, FLOAT32, SUM)


def test_a_cause_is_the_same_on_all_ranks(core, ranks):
    for number, heard in ranks:
        assert cause(core, number) is None
        assert not select.select([heard], [], [], 0)[0]
    core.tfd_abort(ranks[0][0], b"silent", NAMES[1], MESSAGE.encode())
    for rank, (number, heard) in enumerate(ranks):
        assert select.select([heard], [], [], FAR)[0]
        assert heard.recv(2) == b"!"
        before = cause(core, number)
        same = {key: before[key] for key in ("message", "event", "worker", "code")}
        worker = NAMES[1].decode()
        assert same == {
            "message": MESSAGE,
            "event": "silent",
            "worker": worker,
            "code": UNAVAILABLE,
        }
        assert before["detected"] is None
        began = core.tfd_clock()
        assert fail(core, number) == UNAVAILABLE
        error = core.tfd_error().decode()
        assert error.startswith(
            f"{MESSAGE} Detected in all_reduce 'x' float32[3] sum on rank {rank}"
        )
        detected = cause(core, number)["detected"]
        assert detected["operation"] == "all_reduce 'x' float32[3] sum"
        assert detected["rank"] == rank and detected["sequence"] == 1
        assert before["at_ns"] <= began <= detected["begun_ns"] <= detected["ended_ns"]


def test_the_first_cause_counts(core, ranks):
    number, _ = ranks[0]
    core.tfd_abort(number, b"other", b"", b"the first")
    core.tfd_abort(number, b"lost", NAMES[1], b"the second")
    assert cause(core, number)["message"] == "the first"
    core.tfd_close(number)
    assert cause(core, number) is None


def test_an_unknown_event_is_refused(core, ranks):
    number, _ = ranks[0]
    assert core.tfd_abort(number, b"dead", b"", b"gone")
    assert "Received: dead" in core.tfd_error().decode()
    assert cause(core, number) is None
