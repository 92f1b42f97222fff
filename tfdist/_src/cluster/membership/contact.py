"""Repeats a request to another member until it answers, and checks if the member is alive."""

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
    """Sends a request to one member in a separate thread, again and again until it answers.

    Args:
        node: the state of this process as a member.
        calls: opens the connections.
        member: the member that receives the request.
        header: the request.
        is_last: called with the header of each frame; returns whether the frame is the answer.
        patience: how long the member may be silent.
        witnesses: see `Witnesses`.
        again: seconds after an answer until the request is sent again; None to stop after the first
            answer.

    Attributes:
        evidence: the facts that are known about the member.
        answer: the latest answer of the member; None until it has answered.
        last_word: the last word of the member, if the member is dead and its last word is known.
        call: the latest call. After an answer, `Call.take` returns the open connection.
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
        """Ends the attempts and closes the connection, unless `Call.take` has returned it."""
        self._stopped.set()
        with self._node.changed:
            call = self.call
        if call is not None:
            call.close()

    def _run(self) -> None:
        # A shorter limit may apply if no process sees the member alive (`Patience.unseen`). Check
        # before the first call if a process sees it.
        if self._patience.unseen is not None and self._seek(None):
            return
        pause = _PAUSES[0]
        while not self._stopped.is_set():
            call = Call(self._calls, self.member.worker.address, self._header)
            with self._node.changed:
                self.call = call
            if self._stopped.is_set():  # `stop` may have run before `self.call` was set
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
        """Records that the member has sent a frame; returns whether this frame ends the call."""
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
        """The number of seconds for which the member may send no frame during one attempt."""
        unseen = self._patience.unseen
        return self._patience.silent if unseen is None or self.evidence.alive else unseen

    def _seek(self, error: Exception | None) -> bool:
        """Updates the evidence about the member; returns whether the member is known to be dead.

        Args:
            error: the error of the attempt that has just failed; None before the first attempt.
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
                since = now  # refusals did not count while the member was seen alive
            self.evidence = replace(
                before, answered=False, refused_since=since, alive=finding.alive, sought=True
            )
            self._node.changed.notify_all()
        if finding.dead:
            self._note_death(finding.last_word)
        return finding.dead

    def _rest(self, seconds: float) -> None:
        """Sleeps; returns early if the member runs on this machine and dies."""
        place = self.member.place
        if is_visible(place, self._node.member.place):
            is_dead(place, seconds)
        else:
            self._stopped.wait(seconds)

    def _find(self) -> LivenessResult:
        """Finds out if the member is dead: from its last word, the system, or other processes."""
        if word := self._node.last_word(self.member.incarnation):
            return LivenessResult(True, word)
        witnesses = [one.worker.address for one in self._witnesses(self.member)]
        return inspect(self._calls, self.member, self._node.member.place, witnesses)

    def _replaced(self, answer: Header) -> bool:
        """Handles an answer of another process at the member's address.

        The member must be dead, because another process uses its address. This method looks for the
        last word of the member.

        Args:
            answer: the answer of the other process, with its identity.

        Returns:
            Whether the search is complete. If False, the last word may still be found later.
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
