"""Encodes the messages between members as headers of frames, and decodes them."""

from collections.abc import Mapping
from typing import Any

from tfdist._src.cluster.membership import consensus
from tfdist._src.cluster.membership.view import decode_view, encode_view
from tfdist._src.cluster.net.framing import Header, WireError

FRAME_LIMIT = 4 * 1024 * 1024
"""The maximum size of a frame: enough for a few views of thousands of members."""


def encode_request(request: consensus.Request) -> Header:
    """Converts a proposer's request to the header of a frame."""
    header = {"view": encode_view(request.view), "ballot": _ballot(request.ballot)}
    if isinstance(request, consensus.Accept):
        return {"kind": "accept", **header, "proposal": encode_view(request.proposal)}
    return {"kind": "prepare", **header}


def decode_request(header: Header) -> consensus.Request:
    """Converts the header of a frame to a proposer's request.

    Raises:
        WireError: the header is malformed.
    """
    view, ballot = decode_view(header.get("view")), _decode_ballot(header.get("ballot"))
    if header["kind"] == "accept":
        return consensus.Accept(view, ballot, decode_view(header.get("proposal")))
    return consensus.Prepare(view, ballot)


def encode_reply(reply: consensus.Reply) -> Header:
    """Converts a member's reply to a proposer to the header of a frame."""
    if isinstance(reply, consensus.Promise):
        vote = _vote(reply.accepted)
        return {"kind": "promise", "ballot": _ballot(reply.ballot), "accepted": vote}
    if isinstance(reply, consensus.Accepted):
        return {"kind": "accepted", "ballot": _ballot(reply.ballot)}
    if isinstance(reply, consensus.Refused):
        promised = _ballot(reply.promised)
        return {"kind": "refused", "ballot": _ballot(reply.ballot), "promised": promised}
    return {"kind": "decided", "view": encode_view(reply.view)}


def decode_reply(header: Header) -> consensus.Reply | None:
    """Converts the header of a frame to a reply to a proposer; None for other kinds of frames.

    Raises:
        WireError: the header is malformed.
    """
    kind = header["kind"]
    if kind == "decided":
        return consensus.Decided(decode_view(header.get("view")))
    if kind not in ("promise", "accepted", "refused"):
        return None
    ballot = _decode_ballot(header.get("ballot"))
    if kind == "promise":
        return consensus.Promise(ballot, _decode_vote(header.get("accepted")))
    if kind == "refused":
        return consensus.Refused(ballot, _decode_ballot(header.get("promised")))
    return consensus.Accepted(ballot)


def encode_acceptor(acceptor: consensus.AcceptorState) -> dict[str, Any]:
    """Converts the promises and votes of a process to an object that can be serialized as JSON."""
    return {
        "view": encode_view(acceptor.view),
        "promised": _ballot(acceptor.promised),
        "accepted": _vote(acceptor.accepted),
        "excluded": encode_view(acceptor.excluded),
    }


def decode_acceptor(data: object) -> consensus.AcceptorState:
    """Converts the result of `encode_acceptor` back to the promises and votes of a process.

    Raises:
        WireError: the data is malformed.
    """
    if not isinstance(data, Mapping):
        raise WireError("it sent no record")
    view, excluded = data.get("view"), data.get("excluded")
    return consensus.AcceptorState(
        decode_view(view) if view is not None else None,
        _decode_ballot(data.get("promised")),
        _decode_vote(data.get("accepted")),
        decode_view(excluded) if excluded is not None else None,
    )


def _ballot(ballot: consensus.Ballot) -> list[int]:
    return [ballot.round, ballot.rank]


def _decode_ballot(data: object) -> consensus.Ballot:
    if not isinstance(data, list) or len(data) != 2 or any(type(n) is not int for n in data):
        raise WireError("it sent a malformed ballot")
    return consensus.Ballot(*data)


def _vote(vote: consensus.Vote | None) -> dict[str, Any] | None:
    return {"ballot": _ballot(vote.ballot), "view": encode_view(vote.view)} if vote else None


def _decode_vote(data: object) -> consensus.Vote | None:
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise WireError("it sent a malformed vote")
    return consensus.Vote(_decode_ballot(data.get("ballot")), decode_view(data.get("view")))
