"""Whether a member is dead for certain, and its last word: seen here, or asked of others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.consensus import AcceptorState
from tfdist._src.cluster.membership.place import is_dead, is_visible
from tfdist._src.cluster.membership.record import read
from tfdist._src.cluster.membership.view import Member, Place, encode_member
from tfdist._src.cluster.membership.wire import decode_acceptor, encode_acceptor
from tfdist._src.cluster.net.framing import Header, WireError
from tfdist.errors import TfdistError

_SECONDS = 2.0


@dataclass(frozen=True)
class Finding:
    """What has been found out about a member.

    Attributes:
        dead: whether it is dead for certain; False if it is alive, and if that is unknown.
        last_word: what it has promised and accepted last, if it is dead and that is known.
        alive: whether a process that would see its death sees none.
    """

    dead: bool = False
    last_word: AcceptorState | None = None
    alive: bool = False


def look(place: Place, mine: Place) -> Finding:
    """Looks at a process, which tells something only on the machine where it runs, or ran.

    Args:
        place: where it runs.
        mine: where this process runs.
    """
    if not is_visible(place, mine):
        return Finding()
    if not is_dead(place):
        return Finding(alive=True)
    return Finding(True, read(place.record))  # only now it does not change any more


def inspect(calls: Calls, member: Member, mine: Place, witnesses: Iterable[str] = ()) -> Finding:
    """Looks at a member, and asks processes that run where it does.

    Args:
        calls: how to call.
        member: the member.
        mine: where this process runs.
        witnesses: the addresses of processes to ask, after its launcher.
    """
    place = member.place
    finding = look(place, mine)
    own = [place.witness] if place.witness and not is_visible(place, mine) else []
    for address in (*own, *witnesses):
        if finding.dead:
            break
        found = ask(calls, address, member)
        finding = replace(found, alive=not found.dead and (found.alive or finding.alive))
    return finding


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
        return Finding(alive=answer.get("alive") is True)
    except (OSError, WireError, TfdistError):
        pass
    return Finding()


def reply(finding: Finding) -> Header:
    """The answer to `ask`."""
    word = finding.last_word
    return {
        "kind": "inspected",
        "dead": finding.dead,
        "alive": finding.alive,
        "acceptor": encode_acceptor(word) if word else None,
    }
