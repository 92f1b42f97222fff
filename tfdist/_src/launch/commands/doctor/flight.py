"""What the flight logs of a job say."""

from __future__ import annotations

from pathlib import Path

from tfdist._src.launch.flight.diagnosis import diagnose
from tfdist._src.launch.flight.folder import read
from tfdist._src.launch.flight.merge import merge
from tfdist._src.launch.flight.report import to_json, to_text
from tfdist.errors import LaunchError


def report(path: Path, *, as_json: bool) -> str:
    """Reads the logs in a folder and explains them.

    Args:
        path: the folder.
        as_json: whether to return a JSON object instead of text.

    Raises:
        LaunchError: the folder cannot be read, or has no log that can.
    """
    try:
        folder = read(path)
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be read ({error.strerror}). Pass the folder with the flight logs."
        ) from error
    if not folder.logs:
        skipped = "".join(f" {line}." for line in folder.skipped)
        raise LaunchError(
            f"{path} has no flight log that can be read (flight-rank*.json).{skipped} Workers "
            f"write them on an error, when a collective stalls and on SIGUSR1: to "
            f"TFDIST_FLIGHT_DIR, or to the launcher's log folder (--log-dir)."
        )
    diagnosis = diagnose(merge(folder.logs))
    return (to_json if as_json else to_text)(diagnosis, folder)
