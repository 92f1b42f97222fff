"""Whether other users can put libraries into a directory, which this process would then load."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def writable_by_others(folder: Path) -> str | None:
    """Why other users can change what is in a directory.

    Others must not be able to write to it, nor to replace it: that takes a directory above it that
    they can write to, unless it is sticky, as /tmp is.

    Args:
        folder: an existing directory.

    Returns:
        The reason; None if only this user and root can.

    Example:
        >>> import tempfile
        >>> writable_by_others(Path(tempfile.mkdtemp())) is None
        True
    """
    path = Path(os.path.abspath(folder))
    for link in (path, *path.parents):
        if link.is_symlink() and link.lstat().st_uid not in (os.getuid(), 0):
            return f"the link {link} belongs to {_user(link.lstat().st_uid)}"
    folder = path.resolve()
    # Also those above a link, where it could be replaced.
    above = {place.resolve() for place in (*path.parents, *folder.parents)}
    for place in (folder, *sorted(above, reverse=True)):
        status = place.stat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{place} belongs to {_user(status.st_uid)}"
        if place != folder and status.st_mode & stat.S_ISVTX:
            continue
        if status.st_mode & stat.S_IWOTH:
            return f"everyone can write to {place}"
        if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
            return f"the group {_group(status.st_gid)} can write to {place}"
    return None


def _is_own_group(gid: int) -> bool:
    """Whether a group is the one that has this user's name, as many systems create them, or root's.

    Who has a group as the primary one is not always known: directory services need not tell.
    """
    try:
        group = grp.getgrgid(gid)
        mine = {pwd.getpwuid(os.getuid()).pw_name, "root"}
        return group.gr_name in mine and set(group.gr_mem) <= mine
    except KeyError:  # users of a directory service, or of no service at all
        return gid == 0


def _user(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
