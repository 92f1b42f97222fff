"""SIGTERM from a scheduler: a request to save the state and to go."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from tfdist.trainer.fit.step_requests import requests


@contextlib.contextmanager
def requesting_on_sigterm() -> Iterator[None]:
    """Within this context, SIGTERM makes a request; a second one does what it did before.

    Outside of the main thread, where Python allows no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)
        requests.make()

    if before is None:  # Another language has installed it.
        yield
        return
    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, before)
        requests.withdraw()
