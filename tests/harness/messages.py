"""The messages that tfdist logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Collector(logging.Handler):
    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.module == self.module:
            self.lines.append(record.getMessage())


@contextlib.contextmanager
def messages_of(module: str) -> Iterator[list[str]]:
    """Collects the messages that a module of tfdist logs in this context.

    Args:
        module: the name of the module's file, without `.py`.
    """
    collector = _Collector(module)
    logger = logging.getLogger("tfdist")
    logger.addHandler(collector)
    try:
        yield collector.lines
    finally:
        logger.removeHandler(collector)
