"""Iterators end where nobody waits for them."""

from __future__ import annotations

import queue
import threading

from tests.harness.deadlines import FAR
from tests.harness.groups import GROUPS
from tfdist._src.internals.tensorflow import end_in_background


class _Part:
    def __init__(self, ended):
        self._ended = ended

    def __del__(self):
        self._ended.put(threading.current_thread().name)


class _Iterator:
    def __init__(self, *parts):
        self._iterators = list(parts)


def test_they_end_in_a_thread_of_their_own():
    ended: queue.Queue[str] = queue.Queue()
    iterator = _Iterator(_Part(ended), _Part(ended))
    end_in_background(iterator)
    assert ended.empty()
    del iterator
    assert [ended.get(timeout=FAR) for _ in range(2)] == ["tfdist-iterators"] * 2


def test_every_epoch_hands_its_iterator_over():
    place = "tests.keras.iterator_behaviours:ended_in_background"
    assert GROUPS["2"].run(place) == [3, 3]
