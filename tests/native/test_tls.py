"""The core's own TLS: two ranks of two hosts in one process, and what crosses between them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import select
import socket
import threading

import numpy as np
import pytest

from tests.certificates import files
from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive
from tfdist._src import native
from tfdist._src.native.api import Setup
from tfdist.errors import NativeUnavailableError

KEYS = ("tls_certificate", "tls_key", "tls_ca")
NAME = b"gradients that nobody else should see"
FLOAT32, SUM = 7, 0
GROUPS = itertools.count()  # a process has one of a name


@pytest.fixture(scope="module")
def core():
    try:
        return native.load().library
    except NativeUnavailableError as error:
        pytest.skip(str(error))


class Wire(threading.Thread):
    """Passes everything on between two sockets, and keeps it; until it is cut."""

    def __init__(self):
        super().__init__(daemon=True)
        near, here = socket.socketpair()
        there, far = socket.socketpair()
        self.ends = near.detach(), far.detach()
        self.between = {here: there, there: here}
        self.words = bytearray()
        self.start()

    def run(self):
        with contextlib.suppress(OSError, ValueError):
            while True:
                for sock in select.select([*self.between], [], [], 0.1)[0]:
                    if not (data := sock.recv(1 << 18)):
                        return self.cut()
                    self.words += data
                    self.between[sock].sendall(data)

    def cut(self):
        for sock in self.between:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Pair:
    """Two ranks, each in a thread of its own; None for one in the clear.

    Silence for so many `seconds` is a loss.
    """

    def __init__(self, core, *given, seconds=FAR):
        self.core = core
        self.seconds = seconds
        self.control, self.data = self.wires = Wire(), Wire()
        self.given = given
        self.numbers = [0, 0]

    def both(self, function):
        """What the function returns on each rank, or the message of the error there."""
        results = [None, None]

        def one(rank):
            code = function(rank)
            results[rank] = self.core.tfd_error().decode() if code else None

        threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def create(self, rank):
        def place(wire):
            numbers = [-1, -1]
            numbers[1 - rank] = wire.ends[rank]
            return (ctypes.c_int * 2)(*numbers)

        setup = Setup(
            name=b"test %d" % next(GROUPS),
            rank=rank,
            size=2,
            ranks=(ctypes.c_char_p * 2)(b"worker 0 (h0:1)", b"worker 1 (h1:1)"),
            hosts=(ctypes.c_int * 2)(0, 1),
            control=place(self.control),
            data=place(self.data),
            segment=-1,
            silence_warning_seconds=self.seconds,
            silence_timeout_seconds=self.seconds,
            stall_seconds=FAR,
            timeout_seconds=FAR,
            start_seconds=self.seconds,
            algorithm=b"",
            **{key: os.fsencode(path) for key, path in (self.given[rank] or {}).items()},
        )
        number = ctypes.c_int64()
        code = self.core.tfd_create(ctypes.byref(setup), ctypes.byref(number))
        self.numbers[rank] = number.value
        return code

    def all_reduce(self, count, rank):
        mine = np.full(count, rank + 1.5, np.float32)
        code = self.core.tfd_all_reduce(
            self.numbers[rank], NAME, mine.ctypes.data, mine.ctypes.data, count, FLOAT32, SUM
        )
        assert code or (mine == 4.0).all()
        return code

    def close(self):
        for number in self.numbers:
            if number:
                self.core.tfd_abort(number, b"other", b"", b"The test is over.")
                self.core.tfd_close(number)
        for wire in self.wires:
            wire.cut()


@pytest.fixture
def pair(core):
    pairs = []

    def make(*given, **settings):
        pairs.append(Pair(core, *given, **settings))
        return pairs[-1]

    yield make
    for made in pairs:
        made.close()


def test_nothing_crosses_in_the_clear(pair):
    for given in (None, files()):
        two = pair(given, given)
        assert two.both(two.create) == [None, None]
        for count in (0, 1, 100, 5_000, 3_000_001):
            assert two.both(lambda rank, count=count, two=two: two.all_reduce(count, rank)) == [
                None,
                None,
            ]
        secrets = NAME[:20], np.full(16, 1.5, np.float32).tobytes()
        for secret in secrets:
            assert (secret in two.data.words) == (given is None)
        assert (NAME[:20] not in two.control.words) or given is None
        two.close()


def test_a_rank_that_dies_is_noticed(pair):
    two = pair(files(), files())
    assert two.both(two.create) == [None, None]
    two.control.cut()
    assert two.all_reduce(10, 0)
    assert "worker 1 (h1:1) is lost: its process has ended" in two.core.tfd_error().decode()


@exhaustive
def test_bytes_that_were_changed_on_the_way(pair):
    two = pair(files(), files(), seconds=5.0)
    assert two.both(two.create) == [None, None]
    next(iter(two.control.between)).sendall(b"\x17\x03\x03\x00\x20" + bytes(32))

    def until_it_fails(rank):
        while not (code := two.all_reduce(10, rank)):
            pass
        return code

    said = two.both(until_it_fails)
    assert all("worker" in message for message in said)
    assert any("the connection broke (Protocol error)" in message for message in said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(
            (files(), files("expired")),
            "worker 1 (h1:1) cannot be reached in TLS: certificate has",
            marks=exhaustive,
        ),
        (
            (files(), files("stranger", "other_ca")),
            "in TLS: self-signed certificate in certificate chain",
        ),
        pytest.param(
            (files(), None), "worker 1 (h1:1) cannot be reached in TLS: ", marks=exhaustive
        ),
        pytest.param((None, files()), "worker 0 (h0:1) ", marks=exhaustive),
        (
            ({**files(), "tls_secret": "one"}, {**files(), "tls_secret": "other"}),
            "worker 1 (h1:1) cannot be reached in TLS: it does not have the secret",
        ),
    ],
)
def test_who_is_refused(pair, given, said):
    two = pair(*given, seconds=10.0)
    messages = two.both(two.create)
    # To one in the clear the other is gone once it says something.
    messages = [m or two.core.tfd_error().decode() for m in messages]
    assert any(said in message for message in messages), messages
    assert not any("\n" in message for message in messages)


def test_one_that_never_answers(pair):
    two = pair(files(), files(), seconds=1.0)
    assert two.create(0)
    said = two.core.tfd_error().decode()
    assert said == "worker 1 (h1:1) did not complete the TLS handshake within 1.0 s."
    for wire in two.wires:
        os.close(wire.ends[1])


def test_files_that_are_no_good(core, tmp_path):
    def check(**fields):
        return core.tfd_check_tls(*(os.fsencode(fields[key]) for key in KEYS))

    assert check(**files()) == 0
    for given in (
        files(key="stranger"),
        files(key="locked"),
        {**files(), "tls_ca": str(tmp_path)},
        {**files(), "tls_certificate": "/gone.pem"},
    ):
        assert check(**given)
        said = core.tfd_error().decode()
        assert said.startswith("The ") and "tfdist doctor" in said and "\n" not in said
