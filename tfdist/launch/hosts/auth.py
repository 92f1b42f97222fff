"""How a launcher that dials node 0 and node 0 prove to one another that they hold one secret."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tfdist.cluster.auth.hmac_challenge import VARIABLE, is_challenge, new_challenge, prove, proves
from tfdist.launch.hosts.channel import Message
from tfdist.launch.hosts.host_info import HostInfo

_DIALLER = "tfdist launcher that dials"
_NODE_0 = "tfdist launcher of node 0"

REMEDY = f"set the same {VARIABLE} on all nodes, or on none"


class AuthClient:
    """The side that dials: knocks, proves itself, and has node 0 prove itself.

    Args:
        mine: this node.
        secret: what was set here; "" for none, with which the same is done.
    """

    def __init__(self, mine: HostInfo, secret: str) -> None:
        self._secret = secret
        self._challenge: Message = {}
        self.knock: Message = {**mine.to_message(), "challenge": new_challenge()}

    def answer(self, message: Message) -> Message:
        """The answer to node 0's challenge."""
        self._challenge = message
        return {"proof": prove(self._secret, _DIALLER, *_said(self.knock, message))}

    def trusts(self, proof: object) -> bool:
        """Whether node 0 holds the same secret."""
        said = _said(self.knock, self._challenge)
        return bool(self._challenge) and proves(proof, self._secret, _NODE_0, *said)


@dataclass
class AuthServer:
    """Node 0's side: somebody who has dialled and has not proven itself yet.

    Attributes:
        since: the `time.monotonic()` at which it came.
        hello: who it says that it is; None until it has said so.
    """

    since: float
    hello: HostInfo | None = None
    _knock: Message | None = None
    _challenge: Message | None = None

    def challenge(self, message: Message) -> Message:
        """The answer to its first message.

        Raises:
            ValueError: it is no hello.
        """
        if not is_challenge(message.get("challenge")):
            raise ValueError("not a hello: it brings no challenge")
        self.hello = HostInfo.from_message(message)
        self._knock = message
        self._challenge = {"challenge": new_challenge()}
        return self._challenge

    def accept(self, message: Message, secret: str) -> Message | None:
        """The answer to its second message; None where it does not hold the secret."""
        if self._knock is None or self._challenge is None:
            return None
        said = _said(self._knock, self._challenge)
        if not proves(message.get("proof"), secret, _DIALLER, *said):
            return None
        return {"proof": prove(secret, _NODE_0, *said)}


def _said(knock: Message, challenge: Message) -> tuple[bytes, bytes]:
    """What both sides have said, as both have understood it."""
    return json.dumps(knock).encode(), json.dumps(challenge).encode()
