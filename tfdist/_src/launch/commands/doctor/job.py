"""What the workers of a running job are doing."""

from __future__ import annotations

import time

from tfdist._src.cluster.observation import ask
from tfdist._src.launch.live.process import find_job
from tfdist._src.launch.live.ranks import ranks
from tfdist._src.launch.live.view import to_json, to_text
from tfdist._src.options import Options
from tfdist.errors import LaunchError


def report(job: str, *, interval: float, as_json: bool, all_ranks: bool) -> str:
    """Asks rank 0 twice, and tells what the workers did in between.

    Args:
        job: rank 0's `"host:port"` in TF_CONFIG, or the ID of a process on this host: a worker's,
            or that of `tfdist run`. Its secret and its TLS files are used then.
        interval: seconds between the two.
        as_json: whether to return a JSON object instead of text.
        all_ranks: whether the text has all ranks, however many.

    Raises:
        TfdistError: the job cannot be asked; in one line.
    """
    address, environment = find_job(int(job)) if job.isdecimal() else (job, None)
    try:
        options = Options.from_environment(environment)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    before = ask(address, options)
    time.sleep(interval)
    found = ranks(before, ask(address, options))
    if as_json:
        return to_json(address, found)
    return to_text(found, most=None) if all_ranks else to_text(found)
