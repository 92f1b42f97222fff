"""What the workers of a running job are doing."""

from __future__ import annotations

import time

from tfdist.cluster.observation.observer import ask
from tfdist.errors import LaunchError
from tfdist.launch.live.ranks import ranks
from tfdist.launch.live.view import to_json, to_text
from tfdist.options import Options


def report(address: str, *, interval: float, as_json: bool, all_ranks: bool) -> str:
    """Asks rank 0 twice, and tells what the workers did in between.

    Args:
        address: rank 0's `"host:port"` in TF_CONFIG.
        interval: seconds between the two.
        as_json: whether to return a JSON object instead of text.
        all_ranks: whether the text has all ranks, however many.

    Raises:
        TfdistError: the job cannot be asked; in one line.
    """
    try:
        options = Options.from_environment()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    before = ask(address, options)
    time.sleep(interval)
    found = ranks(before, ask(address, options))
    if as_json:
        return to_json(address, found)
    return to_text(found, most=None) if all_ranks else to_text(found)
