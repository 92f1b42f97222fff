"""The record of a process: what it has promised and accepted last, for when it is dead.

It is a small file on this machine, replaced before each answer to another member. When the process
is dead, another of the machine reads it: its last word.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path

from tfdist.cluster.membership.consensus import AcceptorState
from tfdist.cluster.membership.place import is_dead, is_visible
from tfdist.cluster.membership.view import Place
from tfdist.cluster.membership.wire import decode_acceptor, encode_acceptor
from tfdist.cluster.net.framing import WireError
from tfdist.cluster.net.wait_messages import say

_MEMORY = "/dev/shm"
_TRIES = 3
_STALE_SECONDS = 7 * 24 * 3600.0
_CHANGE_SECONDS = 3600.0
"""For how long a record may not know who has come in the change of the group that it is from."""


def folder() -> Path:
    """Where this user's processes keep their records."""
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
    return Path(base) / f".tfdist-members-{os.getuid()}"


class Record:
    """The record of this process.

    Args:
        incarnation: its token, which names the file.

    Attributes:
        path: the file; "" if none can be written, so that its last word will be lost.
    """

    def __init__(self, incarnation: str) -> None:
        self.path = ""
        place = folder()
        for _ in range(_TRIES):  # another process may remove the folder, when it is empty
            try:
                place.mkdir(mode=0o700, exist_ok=True)
                if place.stat().st_uid != os.getuid():
                    return
                self.path = str(place / incarnation)
                self.write(AcceptorState())
                return
            except OSError:
                self.path = ""

    def write(self, acceptor: AcceptorState) -> None:
        """Replaces the record, at once and as a whole.

        Where there is no space for it, it is removed: a last word that is lost only means that the
        others cannot go on without a majority, a wrong one that two groups may.

        Raises:
            OSError: it can be neither written nor removed.
        """
        if not self.path:
            return
        fresh = f"{self.path}.new"
        try:
            with open(fresh, "w") as file:
                json.dump(encode_acceptor(acceptor), file)
            os.replace(fresh, self.path)
        except OSError as error:
            for name in (self.path, fresh):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
            say(
                f"tfdist: what this worker agrees to can no longer be recorded in {self.path}: "
                f"{error.strerror}. If it dies, the others need a majority to go on. Free space."
            )
            self.path = ""

    def remove(self) -> None:
        """Removes the record: nobody needs the last word of this process any more."""
        remove(self.path)
        self.path = ""


def read(path: str) -> AcceptorState | None:
    """The last word of a dead process; None if it has left none."""
    # Nobody else writes there, and a path from another process must lead nowhere else.
    if not path or Path(path).parent != folder():
        return None
    try:
        with open(path) as file:
            return decode_acceptor(json.load(file))
    except (OSError, ValueError, WireError):
        return None


def remove(path: str) -> None:
    """Removes the record of a dead process."""
    if path and Path(path).parent == folder():
        for name in (path, f"{path}.new"):
            with contextlib.suppress(OSError):
                os.unlink(name)
        with contextlib.suppress(OSError):  # it still has others
            os.rmdir(folder())


def sweep(mine: Place) -> None:
    """Removes what jobs that were killed on this machine have left behind.

    Args:
        mine: where this process runs.
    """
    now = time.time()
    with contextlib.suppress(OSError):  # another process may remove the folder, or a file
        for file in folder().iterdir():
            with contextlib.suppress(OSError):
                age = now - file.stat().st_mtime
                if age > _STALE_SECONDS or (age > _CHANGE_SECONDS and _is_over(file, mine)):
                    file.unlink()


def _is_over(file: Path, mine: Place) -> bool:
    """Whether everybody is dead who may want to know this last word."""
    last_word = read(str(file))
    if last_word is None:
        return False
    accepted = last_word.accepted
    views = [last_word.view, last_word.excluded, accepted.view if accepted else None]
    places = [member.place for view in views if view for member in view.members]
    return bool(places) and all(is_visible(one, mine) and is_dead(one) for one in places)
