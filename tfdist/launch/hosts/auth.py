"""Mutual authentication of host 0 and a launcher that dials it, by the job's secret."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tfdist.cluster.auth.hmac_challenge import VARIABLE, is_challenge, new_challenge, prove, proves
from tfdist.launch.hosts.channel import Message
from tfdist.launch.hosts.host_info import HostInfo

_CLIENT = "tfdist launcher client"
_SERVER = "tfdist launcher server"

REMEDY = f"set the same {VARIABLE} on all hosts, or on none"


class AuthClient:
    """The dialing side: sends the hello, proves itself, and verifies host 0.

    Args:
        this_host: this host.
        secret: the job's secret; "" (no secret set) goes through the same exchange.
    """

    def __init__(self, this_host: HostInfo, secret: str) -> None:
        self._secret = secret
        self._challenge: Message = {}
        self.hello: Message = {**this_host.to_message(), "challenge": new_challenge()}

    def answer(self, message: Message) -> Message:
        """The answer to host 0's challenge."""
        self._challenge = message
        return {"proof": prove(self._secret, _CLIENT, *_transcript(self.hello, message))}

    def trusts(self, proof: object) -> bool:
        """Whether host 0 holds the same secret."""
        transcript = _transcript(self.hello, self._challenge)
        return bool(self._challenge) and proves(proof, self._secret, _SERVER, *transcript)


@dataclass
class AuthServer:
    """Host 0's side, for one connection that is not authenticated yet.

    Attributes:
        since: the `time.monotonic()` at which the connection was accepted.
        host: the host it claims to be; None before its hello.
    """

    since: float
    host: HostInfo | None = None
    _hello: Message | None = None
    _challenge: Message | None = None

    def challenge(self, message: Message) -> Message:
        """The answer to its first message.

        Raises:
            ValueError: the message is not a valid hello.
        """
        if not is_challenge(message.get("challenge")):
            raise ValueError("sent an invalid hello: it contains no challenge")
        self.host = HostInfo.from_message(message)
        self._hello = message
        self._challenge = {"challenge": new_challenge()}
        return self._challenge

    def accept(self, message: Message, secret: str) -> Message | None:
        """The answer to its second message; None if it does not hold the secret."""
        if self._hello is None or self._challenge is None:
            return None
        transcript = _transcript(self._hello, self._challenge)
        if not proves(message.get("proof"), secret, _CLIENT, *transcript):
            return None
        return {"proof": prove(secret, _SERVER, *transcript)}


def _transcript(hello: Message, challenge: Message) -> tuple[bytes, bytes]:
    """The messages exchanged so far, as each side understood them."""
    return json.dumps(hello).encode(), json.dumps(challenge).encode()
