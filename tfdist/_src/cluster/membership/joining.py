"""Finds a running job and joins it."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tfdist._src.cluster.auth.identity import REGROUP
from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.contact import MemberProbe
from tfdist._src.cluster.membership.liveness import inspect, look
from tfdist._src.cluster.membership.membership import WHAT, Membership, listen, make_terms
from tfdist._src.cluster.membership.node import Node
from tfdist._src.cluster.membership.proposer import POLL_SECONDS, FormationPolicy
from tfdist._src.cluster.membership.regrouping import Regrouping
from tfdist._src.cluster.membership.view import (
    Member,
    State,
    decode_member,
    decode_view,
    encode_member,
)
from tfdist._src.cluster.net.framing import Header, WireError
from tfdist._src.cluster.net.listener import check_own
from tfdist._src.cluster.net.wait_messages import Announce, WaitMessages
from tfdist._src.cluster.rendezvous.rendezvous import meet
from tfdist._src.cluster.rendezvous.shared_listener import SharedListener
from tfdist._src.cluster.session.session import Session
from tfdist._src.log import logger
from tfdist._src.options import Options
from tfdist.errors import RendezvousError, TfdistError

_ASK_SECONDS = 3.0
_SEARCH_PAUSE_SECONDS = 1.0
_AT_ONCE = 8


class JobFound(Exception):
    """Raised when a running job is found.

    Attributes:
        members: the members of the job. The first one is the member that has answered.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(str(members[0]))
        self.members = members


class JobSearch:
    """Searches for a running job in a background thread, which asks a few workers every second.

    Args:
        calls: sends the requests.
        addresses: the addresses of the workers to ask. They may become members of a running job.
    """

    def __init__(self, calls: Calls, addresses: Sequence[str]) -> None:
        self._calls = calls
        self._addresses = list(addresses)
        self._found: Sequence[Member] = ()
        self._stopped = threading.Event()
        if addresses:
            threading.Thread(target=self._run, name="tfdist-search", daemon=True).start()

    def check(self) -> None:
        """Raises JobFound once the search has found a running job.

        Raises:
            JobFound: one of the workers is a member of a running job.
        """
        if self._found:
            raise JobFound(self._found)

    def stop(self) -> None:
        """Ends the search."""
        self._stopped.set()

    def _run(self) -> None:
        turns = itertools.cycle(self._addresses)
        count = min(_AT_ONCE, len(self._addresses))
        while not (self._found or self._stopped.wait(_SEARCH_PAUSE_SECONDS)):
            self._found, _ = find(self._calls, list(itertools.islice(turns, count)))


def find(calls: Calls, addresses: Iterable[str]) -> tuple[Sequence[Member], TfdistError | None]:
    """Asks several workers in parallel, until a member of a running job answers.

    Args:
        calls: sends the requests.
        addresses: the addresses of the workers, which may be members of a running job.

    Returns:
        The members of the running job and None. The first member is the one that has answered. If
        no member of a running job answers, the result is an empty sequence and the first
        TfdistError of a request, or None if there was no such error.
    """
    answers: queue.Queue[Sequence[Member] | TfdistError] = queue.Queue()

    def ask(address: str) -> None:
        try:
            header = calls.ask(address, {"kind": "who"}, _ASK_SECONDS)
            running = header["kind"] == "member" and header.get("view") is not None
            answers.put(_members(header) if running else ())
        except TfdistError as error:
            answers.put(error)
        except (OSError, WireError, KeyError):
            answers.put(())

    addresses = list(addresses)
    for address in addresses:
        threading.Thread(target=ask, args=(address,), name="tfdist-find", daemon=True).start()
    failure: TfdistError | None = None
    deadline = time.monotonic() + 2 * _ASK_SECONDS
    for _ in addresses:
        try:
            answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(answer, TfdistError):
            failure = failure or answer
        elif answer:
            return answer, None
    return (), failure


def _members(header: Header) -> Sequence[Member]:
    """Returns the members of the job from an answer, starting with the sender of the answer."""
    first = decode_member(header.get("member"))
    others = decode_view(header.get("view")).members
    return (first, *(one for one in others if one.incarnation != first.incarnation))


_PAUSE_SECONDS = 0.2


def meet_or_join(
    topology: Topology, options: Options, announce: Announce = logger.info
) -> Session | Joiner:
    """Starts a new job with the other workers of the cluster, or finds a running job to join.

    This function first asks the other workers if they are members of a running job. If none of them
    is, this process waits for the other workers, and keeps asking them. Another new worker may
    be admitted to a running job at any time, and then leads this process to that job.

    Args:
        topology: the cluster of this process. If the process joins a running job, its own entry in
            the cluster describes the new member.
        options: see `meet` and `Membership`.
        announce: called with each progress message; prints to stderr by default.

    Returns:
        The session of the new job, or a `Joiner` that waits to be admitted to a running job.

    Raises:
        ClusterError: see `meet`.
        TlsError: see `meet`.
        RendezvousError: see `meet`.

    Example:
        >>> found = meet_or_join(from_environment(), Options.from_environment())  # doctest: +SKIP
        >>> session = found.wait() if isinstance(found, Joiner) else found  # doctest: +SKIP
    """
    joiner = join_running(topology, options, announce)
    if joiner is not None:
        return joiner
    calls = Calls(topology, options)
    search = JobSearch(calls, _others(topology))
    try:
        return meet(topology, options, announce=announce, check=search.check)
    except JobFound as found:
        return Joiner(topology, options, calls, found.members, announce)
    finally:
        search.stop()


def join_running(
    topology: Topology, options: Options, announce: Announce = logger.info
) -> Joiner | None:
    """Asks the other workers of the cluster if they are members of a running job.

    Args:
        topology: see `meet_or_join`.
        options: see `Membership`.
        announce: called with each progress message; prints to stderr by default.

    Returns:
        A `Joiner` that waits to be admitted to the running job. None if no member of a running job
        answers.

    Raises:
        ClusterError: this process cannot listen at its address, or the job has a different secret.
        TlsError: the job and this process do not trust each other, or only one of them uses TLS.
    """
    if topology.size == 1:
        return None
    calls = Calls(topology, options)
    found, error = find(calls, _others(topology))
    if not found and error is not None:
        raise error
    return Joiner(topology, options, calls, found, announce) if found else None


class JoinRejected(Exception):
    """Raised when a running job refuses to admit this process; the argument is the reason."""


class Joiner:
    """A process that waits to be admitted to a running job.

    Args:
        topology: the cluster of this process.
        options: see `join_running`.
        calls: sends the requests to the members of the job.
        found: the known members of the job. The first one is asked first.
        announce: called with each progress message.

    Attributes:
        membership: the membership of this process; None until the job has admitted it.
    """

    def __init__(
        self,
        topology: Topology,
        options: Options,
        calls: Calls,
        found: Sequence[Member],
        announce: Announce,
    ) -> None:
        check_own(topology.me.address, name=str(topology.me))
        self.membership: Membership | None = None
        self._topology = topology
        self._options = options
        self._calls = calls
        self._announce = announce
        self._known: dict[str, None] = {}  # addresses
        self._members: Sequence[Member] = ()
        self._target: Member | None = self._note(found)
        self._node = Node(topology, options)
        self._listener = SharedListener(topology, options, WHAT, announce)
        listen(self._listener, self._node, topology)
        self._listener.resume()

    def wait(
        self,
        request: str = "",
        timeout: float | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> Session:
        """Waits until the job has admitted this process, and returns the session of the new group.

        Args:
            request: a text that the members pass to the callback of `Membership.judge_newcomers`.
            timeout: seconds to wait for the admission; `options.start_timeout` by default.
            check: called repeatedly during the wait. An error that it raises ends the wait.

        Raises:
            JoinRejected: the job refuses to admit this process. The caller may call `wait` again.
            RendezvousError: the job has not admitted this process in time, or has ended.
            GroupLostError: the job has admitted this process, but the process cannot form a group
                with the other members.
        """
        seconds = self._options.start_timeout if timeout is None else timeout
        try:
            terms = make_terms(self._options, check=check)
            self._await_admission(seconds, request, terms)
            node = self._node
            reason = f"{node.member} joins, and a member is lost"
            # -1 is lower than all generations: this process did not belong to an earlier one.
            node.regrouping = True
            view, sockets = Regrouping(node, self._calls, terms, False, reason, self._announce).run(
                -1
            )
            rank = view.rank(node.me)
            assert rank is not None
            session = Session(view.topology(rank), sockets, self._options)
        except JoinRejected:
            raise
        except BaseException:
            self.close()
            raise
        node.regrouping, node.leader = False, None
        session.address.let(self._listener)
        self.membership = Membership.admitted(
            session, view, node, self._listener, self._calls, self._options, self._announce
        )
        return session

    def close(self) -> None:
        """Stops waiting."""
        self._listener.end(REGROUP)
        self._node.close(keep_record=self._node.view is not None)

    def _await_admission(self, seconds: float, request: str, terms: FormationPolicy) -> None:
        node = self._node
        deadline = time.monotonic() + seconds
        waits = WaitMessages(node.member.worker, seconds, self._announce)
        header = {"kind": "join", "member": encode_member(node.member), "request": request}
        found = time.monotonic()
        while node.view is None:
            terms.check()
            if self._target is None and (members := find(self._calls, self._addresses())[0]):
                self._target = self._note(members)
            if self._target is not None:
                self._ask(self._target, header, deadline, waits, terms)
                found = time.monotonic()
            elif not node.view:
                if self._has_ended(time.monotonic() - found):
                    raise RendezvousError(
                        f"{node.member} cannot join the running job, which has ended: its workers "
                        "are dead or do not answer. Restart it together with the other workers."
                    )
                with node.changed:
                    node.changed.wait(_PAUSE_SECONDS)
            if node.view is None and time.monotonic() >= deadline:
                raise RendezvousError(
                    f"{node.member} has not been admitted to the running job within {seconds:g} s. "
                    "A job admits workers at the end of a step, with the callback Elastic and up "
                    "to its max_workers; see the log of rank 0, or increase TFDIST_START_TIMEOUT."
                )
            waits.report(lambda: "a member of the running job")

    def _ask(
        self,
        target: Member,
        header: Header,
        deadline: float,
        waits: WaitMessages,
        terms: FormationPolicy,
    ) -> None:
        """Asks one member to admit this process; returns when the member has answered or is lost.

        The member may also redirect this process to another member, which becomes the next target.
        """
        node, self._target = self._node, None
        patience = terms.patience
        last = ("decided", "redirect", "none", "member", "declined")
        contact = MemberProbe(
            node,
            self._calls,
            target,
            header,
            lambda frame: frame["kind"] in last,
            patience,
            lambda other: [],
        )
        try:
            with node.changed:
                while contact.answer is None and node.view is None:
                    now = time.monotonic()
                    evidence = contact.evidence
                    lost = evidence.state(now, patience) is not State.AWAITED
                    # If this member is alive but refuses connections, another one may be reachable.
                    if lost or evidence.is_refused(now, patience) or now >= deadline:
                        node.changed.wait(_PAUSE_SECONDS)
                        return
                    terms.check()
                    waits.report(lambda: f"{target} to admit it")
                    node.changed.wait(POLL_SECONDS)
            answer = contact.answer
            if answer is not None and answer["kind"] == "decided":
                view = decode_view(answer.get("view"))
                self._note(view.members)
                node.learn(view)
            elif answer is not None and answer["kind"] == "redirect":
                self._target = decode_member(answer.get("member"))
                self._known[self._target.worker.address] = None
            elif answer is not None and answer["kind"] == "declined":
                self._target = target  # to ask again
                raise JoinRejected(str(answer.get("reason")))
        finally:
            contact.stop()

    def _addresses(self) -> list[str]:
        mine = self._topology.me.address
        entries = (worker.address for worker in self._topology.workers)
        return [address for address in {**self._known, **dict.fromkeys(entries)} if address != mine]

    def _note(self, members: Sequence[Member]) -> Member:
        """Records the members of the job; returns the first one."""
        self._members = members
        self._known.update({member.worker.address: None for member in members})
        return members[0]

    def _has_ended(self, seconds: float) -> bool:
        """Whether all known members of the job are dead or have been silent for too long.

        Args:
            seconds: the number of seconds since a member last answered.
        """
        patience = make_terms(self._options).patience
        if seconds < patience.refused:  # members do not listen while they connect
            return False
        mine = self._node.member.place
        for member in self._members:
            finding = look(member.place, mine)
            if not finding.dead and not finding.alive and seconds < patience.silent:
                finding = inspect(self._calls, member, mine)
                if not finding.dead:
                    return False
            if finding.alive:
                return False
        return True


def _others(topology: Topology) -> list[str]:
    workers = enumerate(topology.workers)
    return [worker.address for rank, worker in workers if rank != topology.rank]
