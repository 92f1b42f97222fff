"""A worker of the tests: takes steps with the others, and forms a new group when one is lost."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from tfdist._src.cluster import Joiner, Membership, connect, from_environment, meet_or_join, observe
from tfdist._src.cluster.membership import consensus, node, proposer, regrouping
from tfdist._src.cluster.membership.consensus import Accept
from tfdist._src.options import Options
from tfdist.errors import GroupLostError, PeerLostError, TfdistError

# On a busy machine those that leave last take long to answer each other, and a record remains.
regrouping._FAREWELL_SECONDS = regrouping._FAREWELLS_SECONDS = 20.0
LIMITS = {
    "min_workers": int(os.environ.get("MIN_WORKERS", "1")),
    "max_workers": int(os.environ.get("MAX_WORKERS", "100")),
}
LEAVING = set(map(int, os.environ.get("LEAVING", "").split()))  # after the first step
# Where a worker can be made to die while a new group forms.
PHASES: dict[str, tuple[type, str]] = {
    "prepare": (node.Node, "answer"),
    "propose": (consensus.Proposer, "propose"),
    "accept": (node.Node, "answer"),
    "decided": (proposer.ProposalRound, "_tell"),
    "receive": (regrouping.ViewEntry, "_receive"),
    "arrive": (regrouping.ViewEntry, "_arrive"),
}


asked: list[int] = []


def check() -> None:
    if asked:
        raise SystemExit(75)


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def die_in(phase: str) -> None:
    owner, name = PHASES[phase]
    real = getattr(owner, name)

    def dying(*arguments: Any) -> Any:
        if phase == "accept" and not isinstance(arguments[-1], Accept):
            return real(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(owner, name, dying)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    options = Options.from_environment()
    topology = from_environment()
    found = meet_or_join(topology, options)
    if isinstance(found, Joiner):
        tell("waits")
        found.wait(check=check)
        assert found.membership is not None
        membership = found.membership
        tell_of(membership)
    else:
        observe(found, options)
        membership = Membership(found, options)
        tell("met")
    if phase := os.environ.get("DIE_IN"):
        die_in(phase)
    pause = threading.Event()
    while str(membership.session.size) != os.environ.get("END_WITH"):
        session = membership.session
        try:
            if session.topology.generation == 0 and os.environ.get("FAIL"):
                session.fail("a link is broken")
            if session.topology.generation == 0 and LEAVING:
                membership.release(LEAVING)
                if session.rank in LEAVING:
                    tell("released")
                    break
                observe(membership.regroup(**LIMITS), options)
                tell_of(membership)
                continue
            wish = b"regroup" if session.rank == 0 and membership.waiting else b""
            wishes = session.exchange("step", wish)
            if b"regroup" not in wishes:
                pause.wait(0.005)
                continue
        except TfdistError as error:
            tell("failed", error)
            if session.topology.generation == 0:  # as in a callback that takes long
                pause.wait(float(os.environ.get("BUSY", "0")))
        try:
            observe(membership.regroup(**LIMITS, check=check), options)
            tell_of(membership)
        except GroupLostError as error:
            tell("ended", error)
            break
        except PeerLostError as error:  # between two groups
            tell("failed", error)
    if "EXITS" not in os.environ:
        membership.close()
        membership.session.close()


def tell_of(membership: Membership) -> None:
    session = membership.session
    members = ",".join(str(worker.task_index) for worker in session.topology.workers)
    # Meanwhile the address is not the membership's.
    mesh = connect(session, "all", range(session.size), Options.from_environment(), lambda _: 4096)
    assert mesh is not None
    mesh.close()
    tell(f"generation {session.topology.generation} rank {session.rank} members {members}.")


main()
