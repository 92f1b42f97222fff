"""Leaves the group when an error has ended `fit` on this worker alone, and the others wait for it.

An error that all workers raise ends the call on all of them; the group stays, for the next call.
"""

from __future__ import annotations

import json
import threading
import time

from tfdist._src.cluster import Membership
from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.cluster.session.exit_reason import describe
from tfdist._src.group.group import Group
from tfdist._src.recovery.fit_calls import FitCalls
from tfdist.errors import GroupLostError

_PAUSE_SECONDS = 1.0


def whereabouts(group: Group, calls: FitCalls) -> str:
    """What this worker tells another one: the call of `fit` it is in, and whether it waits there.

    Args:
        group: its workers.
        calls: its calls of `fit`.
    """
    regrouping = group.membership is not None and group.membership.regrouping
    waits = regrouping or group.in_any_step or bool(group.session.awaited)
    return json.dumps({"call": calls.number if calls.running else 0, "waits": waits})


def watch_others(group: Group, call: int, error: BaseException) -> None:
    """Leaves the group, in the background, once others have waited in a call of `fit` for long.

    Args:
        group: the workers.
        call: the number of the call that has ended here.
        error: with which it has.
    """
    membership = group.membership
    if membership is None or isinstance(error, GroupLostError):  # The others have gone on.
        return
    watch = threading.Thread(
        target=_watch, args=(group, membership, call, describe(error)), daemon=True
    )
    watch.start()


def _watch(group: Group, membership: Membership, call: int, error: str) -> None:
    since = time.monotonic()
    while not membership.closed:
        running = [one for one in map(json.loads, membership.inquire()) if one["call"] == call]
        if not running:
            return
        now = time.monotonic()
        if not any(one["waits"] for one in running):
            since = now
        elif now - since >= group.options.stall_warning:
            reason = f"{error}. Call {call} of `fit` has ended with it there, but not elsewhere"
            say(f"tfdist: {group.topology.me} leaves the others, which go on without it: {reason}.")
            membership.close(reason)
            group.session.close(reason)
            return
        time.sleep(_PAUSE_SECONDS)
