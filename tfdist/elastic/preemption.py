"""SIGTERM from a scheduler: a request to save the state and to go."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from tfdist.trainer.fit.step_exchange import Request, step_exchange


@contextlib.contextmanager
def requesting_on_sigterm() -> Iterator[None]:
    """Within this context, SIGTERM makes a request and does not end the process.

    Nor do further ones: a scheduler's signal reaches a worker twice if it also goes to the
    launcher, which passes it on. Outside of the main thread, where Python allows no handlers,
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        step_exchange.make(Request.SAVE_AND_EXIT)

    if before is None:  # Another language has installed it.
        yield
        return
    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, before)
        wanted = step_exchange.is_wanted(Request.SAVE_AND_EXIT)
        unheard = wanted and not step_exchange.is_granted(Request.SAVE_AND_EXIT)
        step_exchange.withdraw(Request.SAVE_AND_EXIT)
        if unheard:  # The training ended first.
            os.kill(os.getpid(), signal.SIGTERM)
