"""Keeps asking another member until it answers, and collects evidence about it meanwhile."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from tfdist._src.cluster.membership.calls import Call, Calls
from tfdist._src.cluster.membership.consensus import AcceptorState
from tfdist._src.cluster.membership.liveness import LivenessResult, ask, inspect
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.membership.record import is_dead, is_visible
from tfdist._src.cluster.membership.view import Evidence, Member, Patience, decode_member
from tfdist._src.cluster.net.framing import Header, WireError
from tfdist.errors import TfdistError

_PAUSES = (0.005, 0.2)

Witnesses = Callable[[Member], Iterable[Member]]
"""Returns other processes on the machine of a member."""


class MemberProbe:
    """Asks one member, in a separate thread.

    Args:
        node: this process.
        calls: how to call.
        member: the member to ask.
        header: the request.
        is_last: whether a frame is the answer.
        patience: how long the member may be silent.
        witnesses: see `Witnesses`.
        again: seconds after an answer until the member is asked again; None to ask only once.

    Attributes:
        evidence: the evidence about the member.
        answer: its answer.
        last_word: its last word, if it is dead and the last word is known.
        call: the call that was answered.
    """

    def __init__(
        self,
        node: Node,
        calls: Calls,
        member: Member,
        header: Header,
        is_last: Callable[[Header], bool],
        patience: Patience,
        witnesses: Witnesses,
        again: float | None = None,
    ) -> None:
        self.member = member
        self.answer: Header | None = None
        self.last_word: AcceptorState | None = None
        self.call: Call | None = None
        now = time.monotonic()
        self.evidence = Evidence(silent_since=now)
        self._node = node
        self._calls = calls
        self._header = {**header, "to": member.incarnation}
        self._is_last = is_last
        self._patience = patience
        self._witnesses = witnesses
        self._again = again
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="tfdist-contact", daemon=True).start()

    def stop(self) -> None:
        """Ends the attempts; closes the connection of the answer, unless `Call.take` was called."""
        self._stopped.set()
        with self._node.changed:
            call = self.call
        if call is not None:
            call.close()

    def _run(self) -> None:
        # If a separate limit applies to a member that no process sees alive, look for it first.
        if self._patience.unseen is not None and self._seek(None):
            return
        pause = _PAUSES[0]
        while not self._stopped.is_set():
            call = Call(self._calls, self.member.worker.address, self._header)
            with self._node.changed:
                self.call = call
            if self._stopped.is_set():  # `stop` may have closed only the previous call
                return
            try:
                answer = call.run(self._watch, self._silence)
            except (OSError, WireError, TfdistError) as error:
                if self._seek(error):
                    return
                self._rest(pause)
                pause = min(2 * pause, _PAUSES[1])
                continue
            if self._stopped.is_set():
                call.close()
                return
            if answer["kind"] == "other":
                call.close()
                if self._replaced(answer):
                    return
                self._rest(_PAUSES[1])
                continue
            pause = _PAUSES[0]
            self._note_answer(answer)
            if self._again is None:
                return
            call.close()
            self._stopped.wait(self._again)

    def _watch(self, header: Header) -> bool:
        """Notes a frame as a sign of life; returns whether it ends the call."""
        now = time.monotonic()
        with self._node.changed:
            self.evidence = replace(self.evidence, refused_since=None, silent_since=now)
        return header["kind"] == "other" or self._is_last(header)

    def _note_answer(self, answer: Header) -> None:
        with self._node.changed:
            self.answer = answer
            self.evidence = Evidence(answered=True, silent_since=time.monotonic())
            self._node.changed.notify_all()

    @property
    def _silence(self) -> float:
        """The longest silence that is allowed during one attempt, in seconds."""
        unseen = self._patience.unseen
        return self._patience.silent if unseen is None or self.evidence.alive else unseen

    def _seek(self, error: Exception | None) -> bool:
        """Checks whether the member is alive; returns whether it is dead for certain.

        Args:
            error: the error of the failed attempt; None if there was no attempt.
        """
        now = time.monotonic()
        finding = self._find()
        with self._node.changed:
            before = self.evidence
            since = before.refused_since
            if error is None:
                pass
            elif since is None:
                since = None if isinstance(error, TimeoutError) else now
            elif before.alive and not finding.alive:
                since = now  # refusals were excused while it was seen alive
            self.evidence = replace(
                before, answered=False, refused_since=since, alive=finding.alive, sought=True
            )
            self._node.changed.notify_all()
        if finding.dead:
            self._note_death(finding.last_word)
        return finding.dead

    def _rest(self, seconds: float) -> None:
        """Pauses; ends at once if the member dies meanwhile."""
        place = self.member.place
        if is_visible(place, self._node.member.place):
            is_dead(place, seconds)
        else:
            self._stopped.wait(seconds)

    def _find(self) -> LivenessResult:
        """Returns the finding of this process, or of a process on the member's machine."""
        if word := self._node.last_word(self.member.incarnation):
            return LivenessResult(True, word)
        witnesses = [one.worker.address for one in self._witnesses(self.member)]
        return inspect(self._calls, self.member, self._node.member.place, witnesses)

    def _replaced(self, answer: Header) -> bool:
        """Looks for the last word of a member after another process has answered at its address.

        The member is dead, because another process uses its address.

        Returns:
            Whether to stop asking; otherwise, the last word may still be found.
        """
        finding = self._find()
        if finding.dead:
            self._note_death(finding.last_word)
            return True
        try:
            witness = decode_member(answer.get("member"))
        except WireError:
            return False
        if witness.worker.address != self.member.worker.address:
            return False
        word = ask(self._calls, witness.worker.address, self.member).last_word
        self._note_death(word)
        return word is not None

    def _note_death(self, word: AcceptorState | None) -> None:
        with self._node.changed:
            self.last_word = word
            self.evidence = replace(self.evidence, dead=True, last_word=word is not None)
            self._node.changed.notify_all()
