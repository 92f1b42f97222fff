"""The quorum rule: which members of a view may decide on the next one without the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def may_go_on(view: Sequence[str], present: Collection[str], dead: Collection[str]) -> bool:
    """Whether some members of a view may decide on the next one.

    Two sets of members that may do so never miss each other's decision:

    - More than half of the members, or exactly half with the first one, which breaks the tie. Any
      two such sets have a member in common.
    - All that are alive, if the others are dead for certain and what they had agreed to last is
      known. Without the latter, somebody might already go on: with newcomers whom the dead have
      admitted while one of those present was stopped or cut off.

    Args:
        view: the members of the view, in rank order.
        present: those that take part in the decision.
        dead: those that are dead for certain, and whose last word is known.

    Example:
        >>> may_go_on("abcd", "ab", ""), may_go_on("abcd", "cd", ""), may_go_on("abcd", "cd", "ab")
        (True, False, True)
    """
    here = [member for member in view if member in present]
    if 2 * len(here) > len(view):
        return True
    if 2 * len(here) == len(view) and view[0] in present:
        return True
    return bool(here) and all(member in present or member in dead for member in view)


def is_hopeless(
    view: Sequence[str], present: Collection[str], dead: Collection[str], gone: Collection[str]
) -> bool:
    """Whether those present can never go on, however long they wait.

    Args:
        view: the members of the view, in rank order.
        present: those that take part in the decision.
        dead: those that are dead for certain, and whose last word is known.
        gone: those that are dead for certain, and whose last word is lost.

    Example:
        >>> is_hopeless("ab", "b", "", "a"), is_hopeless("ab", "b", "", "")
        (True, False)
    """
    known = {*present, *dead, *gone}
    # One that is neither may yet turn up, as present or as dead with its last word.
    others = {member for member in view if member not in known}
    return not may_go_on(view, {*present, *others}, dead) and not may_go_on(
        view, present, {*dead, *others}
    )
