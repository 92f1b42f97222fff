"""The membership of this process in a group that can lose and admit members."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import threading
from collections.abc import Callable, Collection, Iterator

from tfdist._src.cluster.auth.identity import OBSERVE, REGROUP
from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.membership import record
from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.node import EXPECTED, MembershipService, Node
from tfdist._src.cluster.membership.proposer import FormationPolicy
from tfdist._src.cluster.membership.record import is_dead, is_visible
from tfdist._src.cluster.membership.regrouping import Regrouping, inquire, say_farewell
from tfdist._src.cluster.membership.view import Member, Patience, View, decode_member, encode_member
from tfdist._src.cluster.membership.wire import decode_acceptor, encode_acceptor
from tfdist._src.cluster.net.wait_messages import Announce
from tfdist._src.cluster.rendezvous.shared_listener import SharedListener, Wake, shared_listener_of
from tfdist._src.cluster.session.session import Session
from tfdist._src.log import logger
from tfdist._src.options import Options
from tfdist.errors import ClusterError, GroupLostError

REFUSED_SECONDS = 5.0
"""The time for which a member's address may refuse connections before the member counts as lost.

No process listens while workers connect to one another, and a name may take seconds to resolve. A
member that is seen alive on its machine gets the same time as a silent one.
"""

_HASTY_SECONDS = 1.0
WHAT = "the other workers cannot reach this one to form a new group"


class Membership:
    """Lets the workers of a session form a new group after a loss, without restarting processes.

    All workers must create their memberships together. From then on, each worker listens at its
    address in a background thread, and can answer the other workers while its program is busy.

    Args:
        session: the session of the group.
        options: the job's options. `start_timeout` limits the time in which enough workers must
            arrive to form a new group. `collective_timeout` limits the time for which a live worker
            may be busy before it arrives. A worker is lost after it has been silent for
            `heartbeat_timeout`. `secret` and the TLS options authenticate the workers.
        announce: called with each progress message; prints to stderr by default.

    Raises:
        ClusterError: this process has no address.
        TfdistError: the session has ended.

    Attributes:
        session: the session of the current group.

    Example:
        >>> membership = Membership(session, Options.from_environment())  # doctest: +SKIP
        >>> session = membership.regroup(min_workers=2)  # doctest: +SKIP
    """

    def __init__(
        self, session: Session, options: Options, announce: Announce = logger.warning
    ) -> None:
        if not session.topology.workers:
            raise ClusterError(
                "A process without an address cannot form a group with others. Received: no "
                "cluster. Set TF_CONFIG, with this process as a worker."
            )
        node = Node(session.topology, options)
        listener = shared_listener_of(session, options, WHAT, announce)
        calls = Calls(session.topology, options)
        # This view contains only this process until the members have exchanged their entries.
        self._view = View(session.topology.generation, (node.member,))
        self._take(session, node, listener, calls, options, announce)
        listen(listener, node, session.topology)
        session.address.let(listener)
        try:
            payload = json.dumps(encode_member(node.member)).encode()
            members = tuple(map(_decode, session.exchange("members", payload)))
            self._view = View(session.topology.generation, members)
            node.learn(self._view)
        except BaseException:
            self.close()
            raise

    @classmethod
    def admitted(
        cls,
        session: Session,
        view: View,
        node: Node,
        listener: SharedListener,
        calls: Calls,
        options: Options,
        announce: Announce,
    ) -> Membership:
        """Creates the membership of a process that has been admitted to a running job."""
        membership = cls.__new__(cls)
        membership._view = view
        membership._take(session, node, listener, calls, options, announce)
        return membership

    def _take(
        self,
        session: Session,
        node: Node,
        listener: SharedListener,
        calls: Calls,
        options: Options,
        announce: Announce,
    ) -> None:
        self.session = session
        self._node = node
        self._listener = listener
        self._calls = calls
        self._options = options
        self._announce = announce
        self._pid = os.getpid()
        self._left: str | None = None  # the reason
        atexit.register(self.close)
        node.on_disturbed = lambda message: self.session.fail(message)

    def judge_newcomers(self, judge: Callable[[str], str | None]) -> None:
        """Registers the callback that decides whether a joining process may be admitted.

        Args:
            judge: called with the request that the joining process has passed to `Joiner.wait`. It
                returns None if the process may be admitted, "" if the process has to wait, and
                otherwise the reason for a refusal, which is sent to the process. The callback runs
                in any thread.
        """
        with self._node.changed:
            self._node.judge = judge

    def tell_others(self, tell: Callable[[], str]) -> None:
        """Registers the callback that returns the report of this worker.

        Args:
            tell: called in any thread when another worker requests the report (see `inquire`).
        """
        self._node.tell = tell

    def inquire(self) -> Iterator[str]:
        """Requests a report from each other worker; yields the reports that arrive in time."""
        return inquire(self._node, self._calls)

    @property
    def regrouping(self) -> bool:
        """Whether the main thread is forming a new group."""
        return self._node.regrouping

    @property
    def closed(self) -> bool:
        """Whether this worker has left the group."""
        return self._left is not None

    @property
    def waiting(self) -> list[Member]:
        """The joining processes that are connected to this worker and may be admitted now.

        Only rank 0 sees all of them, because the other workers redirect them to rank 0.
        """
        taken = {member.worker.address for member in self.view.members}
        return [one for one in self._node.connected if one.worker.address not in taken]

    @property
    def view(self) -> View:
        """The members of the current group."""
        return self._view

    def regroup(
        self,
        *,
        min_workers: int = 1,
        max_workers: int | None = None,
        joiners_welcome: bool = True,
        suspects: Collection[int] = (),
        check: Callable[[], object] = lambda: None,
    ) -> Session:
        """Forms a new group with the other remaining workers.

        The main thread of each worker calls this after the session has failed. All workers may also
        call this together at the end of a step to admit waiting processes. If more workers are lost
        while the new group forms, the remaining workers continue with the next generation. This
        method closes the old session.

        Args:
            min_workers: the minimum size of the new group. If fewer workers are left, they wait for
                newcomers.
            max_workers: the maximum size up to which newcomers are admitted; None for no limit.
            joiners_welcome: whether waiting processes are admitted.
            suspects: ranks of the old group that have already been silent for a long time. The
                group does not wait for another full timeout until they answer, even if they are
                alive.
            check: called repeatedly during the wait. An error that it raises ends the wait.

        Returns:
            The session of the new group.

        Raises:
            GroupLostError: this worker cannot continue. Possible reasons are: this worker has left
                the group; the others have formed a group without it; too few members of the old
                group are left; fewer than `min_workers` workers have arrived within
                `options.start_timeout`; or a live worker has not arrived within
                `options.collective_timeout`, and the other workers are not a majority.
        """
        node, old, before = self._node, self.session, self.view
        if self.closed:
            raise GroupLostError(
                f"{node.member} has left the others: {self._left}. Start it again to join them."
            )
        failure = old.failure
        terms = make_terms(
            self._options,
            min_workers,
            max_workers,
            joiners_welcome,
            frozenset(before.incarnations[rank] for rank in old.lost_ranks),
            frozenset(before.incarnations[rank] for rank in {*suspects, *old.silent_ranks}),
            check,
        )
        reason = f"{node.member} forms a new group: {failure or 'workers join'}"
        node.regrouping, node.failed = True, False
        self._listener.resume()  # a closed session has stopped the listener
        try:
            regrouping = Regrouping(
                node, self._calls, terms, failure is None, reason, self._announce
            )
            view, sockets = regrouping.run(old.topology.generation)
            rank = view.rank(node.me)
            assert rank is not None
            self.session = Session(view.topology(rank), sockets, self._options)
            # Exit handlers run in reverse order. This one must run before the handler of the new
            # session, because closing the session also ends the listener.
            atexit.unregister(self.close)
            atexit.register(self.close)
            self._view = view
        except BaseException:
            node.failed = True
            raise
        finally:
            node.regrouping, node.leader = False, None
        if self._listener.serves(OBSERVE):
            self._listener.end(OBSERVE)  # this service belongs to the old session
        old.address.release()
        self.session.address.let(self._listener)
        # Close the old session in a thread, because connections to lost workers delay the close.
        threading.Thread(target=old.close, name="tfdist-old-session", daemon=True).start()
        self._clean_up(before, view)
        return self.session

    def release(self, leaving: Collection[int]) -> None:
        """Lets some members leave the group; all members must call this together between steps.

        The remaining members receive the last words of the leaving members. The leaving members
        have left the group when this method returns, even if it raises an error.

        Args:
            leaving: the ranks of the leaving members.

        Raises:
            TfdistError: a worker is lost, so some members may not have received the last words.
        """
        leaves, heard, mine = self.session.rank in leaving, False, b""
        try:
            if leaves:
                mine = json.dumps(encode_acceptor(self._node.finish())).encode()
            for rank, word in enumerate(self.session.exchange("last words", mine)):
                if word:
                    acceptor = decode_acceptor(json.loads(word))
                    self._node.say_last_word(self.view.incarnations[rank], acceptor)
            heard = True
        finally:
            if leaves:
                self._left = "it was released"
                self._end(keep_record=not heard)

    def close(self, reason: str = "its membership was closed") -> None:
        """Leaves the group: sends this worker's last word to another member, and stops listening.

        An exit handler calls this when the process exits.

        Args:
            reason: why this worker leaves the group. A later `regroup` raises an error with this
                reason.
        """
        if os.getpid() != self._pid or self.closed:
            return
        self._left = reason
        last_word = self._node.finish()
        # This process still listens here, because members that leave at the same time may send it
        # their last words.
        is_known = say_farewell(self._node, self._calls, last_word)
        self._end(keep_record=not is_known)

    def _end(self, *, keep_record: bool) -> None:
        atexit.unregister(self.close)
        self._listener.end(REGROUP)
        self._node.close(keep_record=keep_record)

    def _clean_up(self, before: View, view: View) -> None:
        """Removes the records of dead members of the old group, which are no longer needed."""
        mine = self._node.member.place
        for member in before.members:
            if member.incarnation not in view.incarnations and is_visible(member.place, mine):
                with contextlib.suppress(OSError):
                    if is_dead(member.place):
                        record.remove(member.place.record)


def listen(listener: SharedListener, node: Node, topology: Topology) -> None:
    """Makes the listener answer the requests of members and of joining processes."""

    def open_service(selector: selectors.BaseSelector, wake: Wake) -> MembershipService:
        return MembershipService(selector, node, topology)

    node.wake = listener.wake
    listener.serve(REGROUP, open_service, EXPECTED)


def make_terms(
    options: Options,
    min_workers: int = 1,
    max_workers: int | None = None,
    joiners_welcome: bool = True,
    suspects: frozenset[str] = frozenset(),
    silent: frozenset[str] = frozenset(),
    check: Callable[[], object] = lambda: None,
) -> FormationPolicy:
    """Returns the conditions for forming a new group, with the timeouts from the options."""
    limit = options.heartbeat_timeout
    timeout = options.start_timeout
    busy = max(timeout, options.collective_timeout)
    return FormationPolicy(
        min_workers,
        max_workers,
        joiners_welcome,
        timeout,
        busy,
        Patience(min(REFUSED_SECONDS, limit), limit),
        min(_HASTY_SECONDS, limit),
        suspects,
        silent,
        check,
    )


def _decode(payload: bytes) -> Member:
    return decode_member(json.loads(payload))
