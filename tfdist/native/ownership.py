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
    folder = Path(os.path.abspath(folder))
    if (status := folder.lstat()) and stat.S_ISLNK(status.st_mode):
        folder = folder.resolve()
    for place in (folder, *folder.parents):
        status = place.stat()
        if status.st_uid not in (os.getuid(), 0):
            return f"{place} belongs to {_user(status.st_uid)}"
        if place != folder and status.st_mode & stat.S_ISVTX:
            continue
        if status.st_mode & stat.S_IWOTH:
            return f"everyone can write to {place}"
        if status.st_mode & stat.S_IWGRP and _has_others(status.st_gid):
            return f"the group {_group(status.st_gid)} can write to {place}"
    return None


def _has_others(gid: int) -> bool:
    """Whether a group has members besides this user and root."""
    try:
        members = set(grp.getgrgid(gid).gr_mem)
        members |= {user.pw_name for user in pwd.getpwall() if user.pw_gid == gid}
        return bool(members - {pwd.getpwuid(os.getuid()).pw_name, "root"})
    except KeyError:  # users of a directory service, or of no service at all
        return gid != 0


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
