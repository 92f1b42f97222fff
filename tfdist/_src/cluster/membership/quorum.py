"""The quorum rule: which members of a view may decide on the next one without the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def may_go_on(view: Sequence[str], present: Collection[str], dead: Collection[str]) -> bool:
    """Whether some members of a view may decide on the next one.

    Those that are dead for certain, and whose last word is known, do not count. Of the others, more
    than half may decide, or exactly half with the first one, which breaks the tie.

    Two decisions never miss each other. The dead have answered with their last word, which binds as
    an answer does; one that had taken part in a higher ballot before it died ends the attempt of
    whoever reads that. So what is left of two sets that may decide lies among those that neither
    counts as dead, of which each has more than half, or the same half. Without the last words,
    somebody might already go on: with newcomers whom the dead have admitted while one of those
    present was stopped or cut off.

    Args:
        view: the members of the view, in rank order.
        present: those that take part in the decision.
        dead: those that are dead for certain, and whose last word is known.

    Example:
        >>> may_go_on("abcd", "ab", ""), may_go_on("abcd", "cd", ""), may_go_on("abcd", "cd", "ab")
        (True, False, True)
    """
    left = [member for member in view if member in present or member not in dead]
    here = [member for member in left if member in present]
    if 2 * len(here) == len(left):
        return bool(here) and left[0] in present
    return 2 * len(here) > len(left)


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
