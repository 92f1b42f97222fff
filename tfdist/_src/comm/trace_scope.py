"""The scope of the code that a thread traces; `tracing.py` and `registry.py` set it."""

import threading


class _TraceScope(threading.local):
    """The scope of this thread.

    Attributes:
        overlaps: whether collectives that are added to a graph overlap with the step.
        is_unnoted: whether reads of the group are exempt from being recorded.
    """

    overlaps = False
    is_unnoted = False


scope = _TraceScope()
