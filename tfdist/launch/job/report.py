"""What the user reads when a job has failed."""

from __future__ import annotations

from pathlib import Path

from tfdist.launch.job.failure import Failure


def describe(failure: Failure, node: int, folder: Path | None) -> str:
    """Says what failed first and where to read on.

    Args:
        failure: the first failure of the job.
        node: the number of this node.
        folder: where the output of this node's workers is; None if nothing was written.

    Returns:
        One or several lines.

    Example:
        >>> failure = Failure(node=0, who="worker 0", what="failed with exit code 3", code=3,
        ...                   rank=0)
        >>> describe(failure, 0, None)
        'worker 0 failed with exit code 3. Its output is above.'
    """
    there = "" if failure.node == node else f" on node {failure.node}"
    lines = [str(failure)]
    if failure.rank is not None:
        if not failure.log:
            place = "above" if not there else f"at the terminal of node {failure.node}"
            lines[0] += f" Its output is {place}."
        elif failure.tail:
            lines[0] += " Its last lines of output:"
            lines += [f"  | {line}" for line in failure.tail]
            lines.append(f"  Its whole output{there}: {failure.log}")
        else:
            lines[0] += f" It printed nothing to {failure.log}{there}."
    if folder is not None and (there or not failure.log):
        lines.append(f"  The output of the workers here: {folder}")
    return "\n".join(lines)
