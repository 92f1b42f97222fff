"""What members tell one another while no group forms."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.consensus import AcceptorState
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.membership.view import encode_member
from tfdist._src.cluster.membership.wire import encode_acceptor
from tfdist._src.cluster.net.framing import WireError
from tfdist.errors import TfdistError

_INQUIRY_SECONDS = 2.0
_FAREWELL_SECONDS = 2.0
_FAREWELLS_SECONDS = 3.0
"""For all members that are tried."""


def inquire(node: Node, calls: Calls) -> Iterator[str]:
    """What the other members tell about themselves; those that do not answer are left out."""
    for other in node.others:
        header = {"kind": "inquire", "to": other.incarnation}
        try:
            answer = calls.ask(other.worker.address, header, _INQUIRY_SECONDS)
        except (OSError, WireError, TfdistError):
            continue
        if answer["kind"] == "told":
            yield str(answer["text"])


def say_farewell(node: Node, calls: Calls, last_word: AcceptorState) -> bool:
    """Tells another member what this one has agreed to last, and those whose last words it has.

    So whoever leaves last has heard of all the others.

    Returns:
        Whether nobody needs to read its record any more.
    """
    header = {
        "kind": "farewell",
        "member": encode_member(node.member),
        "acceptor": encode_acceptor(last_word),
    }
    until = time.monotonic() + _FAREWELLS_SECONDS
    for other in node.others:
        seconds = min(_FAREWELL_SECONDS, until - time.monotonic())
        if seconds <= 0:
            break
        try:
            heard = {one: encode_acceptor(word) for one, word in node.last_words.items()}
            to = {**header, "heard": heard, "to": other.incarnation}
            answer = calls.ask(other.worker.address, to, seconds)
        except (OSError, WireError, TfdistError):  # it ends too, or is busy
            continue
        if answer["kind"] != "other":
            return True
    return not node.others  # They may have said their last word meanwhile.
