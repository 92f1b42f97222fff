"""Goes back to the last snapshot, in the same processes, where no worker has the whole state."""

from __future__ import annotations

from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.group.group import Group
from tfdist._src.internals.iterators import set_initial_epoch
from tfdist._src.keras.fit.added_callbacks import Entries
from tfdist.errors import GroupLostError, SnapshotError


class BeginsAnew(Exception):
    """Leaves `fit`, in order to enter it as in a process that has just started."""


def go_back(lost: GroupLostError, entries: Entries, group: Group, standing: int) -> None:
    """Has `fit` begin anew from the last snapshot; called by all workers.

    A callback with a method `on_state_lost(standing)` reads it: it returns after how many steps it
    was taken, and how many have been trained since; zeros if there is none, and no step has been
    trained; None if there is none that would be needed.

    Args:
        lost: why no worker can go on.
        entries: what all entries of the call of `fit` have in common.
        group: the workers, among whom some may be new.
        standing: how many steps stood on the worker that was furthest.

    Raises:
        GroupLostError: there is no snapshot that can be gone back to.
    """
    several = [getattr(callback, "on_state_lost", None) for callback in entries.callbacks.callbacks]
    read = next(filter(None, several), None)
    mine = "there is no BackupAndRestore" if read is None else entries.data.obstacle
    obstacle = next(filter(None, group.exchange("obstacle", mine)), "")
    if read is None or obstacle:
        raise GroupLostError(_no_way(lost, obstacle))
    try:
        found = read(standing)
    except SnapshotError as error:
        raise GroupLostError(_no_way(lost, str(error))) from error
    if found is None:
        raise GroupLostError(_no_way(lost, "there is no complete one"))
    entries.callbacks.begin_anew()
    entries.data.begin_anew()
    set_initial_epoch(entries.callbacks.model, None)
    if group.topology.is_chief:
        steps, again = found
        if not steps:
            say("tfdist: nobody has trained a step yet, and all begin anew.")
            return
        say(
            "tfdist: no worker that is left has the whole state of the training, so all go back to "
            f"the snapshot of step {steps}: {again} steps are trained again."
        )


def _no_way(lost: GroupLostError, why: str) -> str:
    return f"{lost} These workers cannot go back to a snapshot: {why}."
