"""Many workers' state machines, and everything that may happen to them, driven by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tfdist._src.cluster.cluster_spec import Worker
from tfdist._src.cluster.membership.consensus import (
    NONE,
    AcceptorState,
    Ballot,
    Decided,
    Proposer,
    Reply,
    Request,
    may_go_on,
    next_ballot,
)
from tfdist._src.cluster.membership.view import Member, ProcessIdentity, View, compose

MAX_WORKERS = 6


@dataclass
class Process:
    """One worker.

    Attributes:
        inside: the view that it has entered, with which it trains.
        entered: the generation of the last one.
        seen: ballots that it has heard of.
        stuck: whether its program is busy, while it answers others.
        absent: the members of its view that it has waited for in vain.
    """

    member: Member
    acceptor: AcceptorState
    alive: bool = True
    stopped: bool = False
    side: int = 0
    inside: View | None = None
    entered: int = -1
    proposer: Proposer | None = None
    seen: list[Ballot] = field(default_factory=lambda: [NONE])
    stuck: bool = False
    absent: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.member.incarnation

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped


Message = tuple[str, str, Request | Reply | Decided]


class World:
    """The processes of a job, and the messages between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hosts = self.random.randint(1, 3)
        # Those hosts that have a launcher, and on which side of a cut it is.
        having = [h for h in range(self.hosts) if self.random.random() < 0.5]
        self.launchers = {str(host): 0 for host in having}
        self.processes: dict[str, Process] = {}
        self.messages: list[Message] = []
        self.decided: dict[int, View] = {}
        self.effective = 0
        size = self.random.randint(2, 5)
        members = tuple(self.new_member(f"w{i}") for i in range(size))
        first = View(0, members)
        self.decided[0] = first
        for member in members:
            process = Process(member, AcceptorState(first), inside=first, entered=0)
            self.processes[member.incarnation] = process

    def new_member(self, address: str) -> Member:
        name = f"p{len(self.processes) + self.random.getrandbits(40)}"
        host = str(self.random.randrange(self.hosts))
        return Member(Worker("worker", 0, address), name, ProcessIdentity(host, 1, 1))

    # What the processes do.

    def learn(self, process: Process, view: View) -> None:
        known = self.decided.setdefault(view.generation, view)
        assert known == view, f"two views of generation {view.generation} are decided"
        self.set_acceptor(process, process.acceptor.learn(view, process.name))

    def set_acceptor(self, process: Process, acceptor: AcceptorState) -> None:
        if acceptor.view is not process.acceptor.view or acceptor.excluded:
            process.inside = None  # it leaves what it was in
            process.proposer = None
            process.absent = frozenset()
        process.acceptor = acceptor

    def enter(self, process: Process) -> None:
        """What a worker does once it has left its old session: it meets the others of its view."""
        view = process.acceptor.view
        if view is None or process.acceptor.excluded or view.generation <= process.entered:
            return
        process.inside, process.entered = view, view.generation
        self.check()

    def leave_out(self, process: Process) -> None:
        """Waits no longer for the members of a view that are not in it."""
        view = process.acceptor.view
        if view is None or process.acceptor.excluded or self.is_effective(view):
            return
        members = [self.processes[name] for name in view.incarnations]
        late = {one.name for one in members if one.alive and one.inside != view}
        self.go_on_without(process, late - {process.name})

    def go_on_without(self, process: Process, late: set[str]) -> None:
        """Leaves a view, and begins to have the next one decided."""
        view = process.acceptor.view
        assert view is not None
        process.absent = frozenset(late)
        process.inside, process.entered = None, view.generation  # it never enters it any more
        self.attempt(process)

    def check(self) -> None:
        views = {p.inside for p in self.processes.values() if p.alive and p.inside}
        effective = [view for view in views if self.is_effective(view)]
        assert len(effective) <= 1, "two groups train at once"
        self.effective = max([self.effective, *(view.generation for view in effective)])

    def is_effective(self, view: View) -> bool:
        members = [self.processes[name] for name in view.incarnations]
        return all(one.alive and one.inside == view for one in members)

    def attempt(self, process: Process) -> None:
        """Begins to have the next view decided, with a higher ballot than any it knows."""
        view = process.acceptor.view
        if view is None or process.acceptor.excluded:
            return
        rank = view.rank(process.name)
        assert rank is not None
        proposer = Proposer(view, next_ballot(rank, process.seen))
        process.seen.append(proposer.ballot)
        process.proposer = proposer
        self.ask(process)

    def ask(self, process: Process) -> None:
        """Sends what the proposer asks to all members that it may concern."""
        proposer = process.proposer
        if proposer is None:
            return
        asked = proposer.view.incarnations
        if proposer.proposal is not None:
            asked = tuple(name for name in asked if name in proposer.promised)
        for name in asked:
            self.messages.append((process.name, name, proposer.request))

    def propose(self, process: Process) -> None:
        """Gives up on whoever has not answered, and proposes if the rule allows it."""
        proposer = process.proposer
        if proposer is None or proposer.proposal is not None or not proposer.may_propose:
            return
        waiting = [
            one.member
            for one in self.processes.values()
            if one.runs and one.acceptor.view is None and one.side == process.side
        ]
        self.random.shuffle(waiting)
        welcome = self.random.random() < 0.7
        rest = proposer.promised - process.absent
        if not proposer.bound and not may_go_on(proposer.view.incarnations, rest, proposer.dead):
            return
        view = compose(proposer.view, rest, waiting if welcome else [], MAX_WORKERS)
        self.propose_view(process, proposer, view)
        self.ask(process)

    def propose_view(self, process: Process, proposer: Proposer, view: View) -> None:
        proposer.propose(view)

    def bury(self, process: Process) -> None:
        """Finds out which members are dead; only somebody on their machine can."""
        proposer = process.proposer
        if proposer is None:
            return
        for name in proposer.view.incarnations:
            other = self.processes[name]
            if self.counts_as_dead(process, other):
                self.bury_one(proposer, other)
        self.conclude(process)

    def counts_as_dead(self, process: Process, other: Process) -> bool:
        """Whether a process takes another one for dead."""
        return not other.alive and self.is_proven(process, other)

    def bury_one(self, proposer: Proposer, dead: Process) -> None:
        proposer.bury(dead.name, dead.acceptor)

    def is_proven(self, process: Process, dead: Process) -> bool:
        """Whether somebody whom a process can reach runs where the dead one did."""
        if self.launchers.get(dead.member.place.machine) == process.side:
            return True
        return any(
            one.runs
            and one.side == process.side
            and one.member.place.machine == dead.member.place.machine
            for one in self.processes.values()
        )

    def conclude(self, process: Process) -> None:
        proposer = process.proposer
        if proposer is None:
            return
        if proposer.overruled:
            process.seen.append(proposer.overruled)
        if (view := proposer.decided) is not None:
            process.proposer = None
            self.learn(process, view)
            for name in {*proposer.view.incarnations, *view.incarnations} - {process.name}:
                self.messages.append((process.name, name, Decided(view)))

    def deliver(self, message: Message) -> None:
        source, target, content = message
        process = self.processes[target]
        if not process.runs or self.processes[source].side != process.side:
            return
        if isinstance(content, Decided):
            if (proposer := process.proposer) is not None:
                proposer.receive(source, content)
            self.learn(process, content.view)
            self.conclude(process)
        elif hasattr(content, "view"):
            acceptor, reply = process.acceptor.answer(content, process.name)
            self.set_acceptor(process, acceptor)
            if reply is not None:
                self.messages.append((target, source, reply))
        elif process.proposer is not None:
            process.proposer.receive(source, content)
            self.conclude(process)

    # What happens to them.

    def kill(self, process: Process) -> None:
        process.alive, process.inside, process.proposer = False, None, None

    def lose(self, host: str) -> None:
        """A host fails as a whole."""
        self.launchers.pop(host, None)
        for process in self.processes.values():
            if process.member.place.machine == host:
                self.kill(process)

    def cut(self) -> None:
        for process in self.processes.values():
            process.side = self.random.randrange(2)
        self.launchers = {host: self.random.randrange(2) for host in self.launchers}

    def heal(self) -> None:
        for process in self.processes.values():
            process.side = 0
        self.launchers = dict.fromkeys(self.launchers, 0)

    def join(self) -> None:
        """A worker comes, possibly at the address of a dead one."""
        dead = [p.member.worker.address for p in self.processes.values() if not p.alive]
        fresh = f"w{len(self.processes)}"
        address = self.random.choice(dead) if dead and self.random.random() < 0.5 else fresh
        member = self.new_member(address)
        self.processes[member.incarnation] = Process(member, AcceptorState())

    def act(self) -> None:
        """One random event."""
        rng = self.random
        chance = rng.random()
        if chance < 0.8 and self.messages:
            place = rng.randrange(len(self.messages))
            message = self.messages[place]
            if rng.random() > 0.1:  # else it comes once more, later
                last = self.messages.pop()
                if place < len(self.messages):
                    self.messages[place] = last
            if rng.random() > 0.05:
                self.deliver(message)
            return
        process = rng.choice(list(self.processes.values()))
        if chance < 0.962:
            if process.runs and not process.stuck:
                rng.choice(ACTS)(self, process)
        elif chance < 0.97:
            process.stuck = not process.stuck and process.alive
        elif chance < 0.976:
            if process.alive:
                self.kill(process)
        elif chance < 0.977:
            self.lose(process.member.place.machine)
        elif chance < 0.984:
            process.stopped = not process.stopped and process.alive
        elif chance < 0.992:
            if rng.random() < 0.5:
                self.cut()
            else:
                self.heal()
        elif len(self.processes) < 9:
            self.join()

    # The end: whoever is alive can reach everyone, and nothing is lost any more. Some stay stuck.

    def latest(self) -> View:
        """The last view that a living worker knows."""
        views = [p.acceptor.view for p in self.processes.values() if p.alive and p.acceptor.view]
        return max(views, key=lambda view: view.generation, default=self.decided[0])

    def can_go_on(self) -> bool:
        view = self.latest()
        members = [self.processes[name] for name in view.incarnations]
        alive = {
            one.name for one in members if one.alive and not one.stuck and not one.acceptor.excluded
        }
        dead = {one.name for one in members if not one.alive}
        proven = {n for n in dead if any(self.is_proven(o, self.processes[n]) for o in members)}
        return may_go_on(view.incarnations, alive, proven)

    def settle(self, *, stuck: bool) -> bool:
        """Runs fairly until a group trains; returns whether one must.

        Args:
            stuck: whether those that are stuck remain so.
        """
        for process in self.processes.values():
            process.stopped = False
            process.proposer = None
            process.stuck &= stuck
        self.heal()
        for _ in range(40):
            for process in list(self.processes.values()):
                if process.alive and not process.stuck:
                    self.enter(process)
            if self.is_effective(self.latest()):
                return True
            if not self.can_go_on():
                return False
            view = self.latest()
            for name in view.incarnations:  # all have heard of the latest view
                if self.processes[name].alive:
                    self.learn(self.processes[name], view)
            ours = [self.processes[name] for name in view.incarnations]
            here = [one for one in ours if one.alive and not one.stuck]
            lead = next(one for one in here if not one.acceptor.excluded)
            self.go_on_without(lead, {one.name for one in ours if one.alive and one.stuck})
            self.drain()
            self.bury(lead)
            self.propose(lead)
            self.drain()
        raise AssertionError("no group trains, though enough are alive and connected")

    def drain(self) -> None:
        while self.messages:
            self.deliver(self.messages.pop(0))


ACTS = (World.enter, World.attempt, World.leave_out, *[World.propose, World.bury] * 2)
