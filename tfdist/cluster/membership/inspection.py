"""Whether a member is dead for certain, and its last word: seen here, or asked of others."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.cluster.membership.calls import Calls
from tfdist.cluster.membership.consensus import AcceptorState
from tfdist.cluster.membership.place import is_dead, is_visible
from tfdist.cluster.membership.record import read
from tfdist.cluster.membership.view import Member, Place, encode_member
from tfdist.cluster.membership.wire import decode_acceptor, encode_acceptor
from tfdist.cluster.net.framing import Header, WireError
from tfdist.errors import TfdistError

_SECONDS = 2.0


@dataclass(frozen=True)
class Finding:
    """What has been found out about a member.

    Attributes:
        dead: whether it is dead for certain; False if it is alive, and if that is unknown.
        last_word: what it has promised and accepted last, if it is dead and that is known.
    """

    dead: bool = False
    last_word: AcceptorState | None = None


def look(place: Place, mine: Place) -> Finding:
    """Looks at a process, which tells something only on the machine where it runs, or ran.

    Args:
        place: where it runs.
        mine: where this process runs.
    """
    if not (is_visible(place, mine) and is_dead(place)):
        return Finding()
    return Finding(True, read(place.record))  # only now it does not change any more


def ask(calls: Calls, address: str, member: Member) -> Finding:
    """Asks a process that runs where a member does; without an answer, nothing is known.

    Args:
        calls: how to call.
        address: that of the process.
        member: the member.
    """
    header = {"kind": "inspect", "member": encode_member(member)}
    try:
        answer = calls.ask(address, header, _SECONDS)
        word = answer.get("acceptor")
        if answer["kind"] == "inspected" and answer.get("dead") is True:
            return Finding(True, decode_acceptor(word) if word is not None else None)
    except (OSError, WireError, TfdistError):
        pass
    return Finding()


def reply(finding: Finding) -> Header:
    """The answer to `ask`."""
    word = finding.last_word
    return {
        "kind": "inspected",
        "dead": finding.dead,
        "acceptor": encode_acceptor(word) if word else None,
    }
