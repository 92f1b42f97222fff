"""Runs a function: `python -m tfdist.spark.worker FOLDER`.

In a process of its own, so that nothing is left of one training when the next one begins in the
same Python process of Spark.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from pyspark import cloudpickle

from tfdist.cluster.this_worker import rank
from tfdist.spark.program import FUNCTION, RESULT


def main(folder: Path) -> None:
    """Calls the function, and keeps what it returns on rank 0."""
    function, args, kwargs = pickle.loads((folder / FUNCTION).read_bytes())
    try:
        result = function(*args, **kwargs)
    except SystemExit as end:
        if end.code:
            raise
        result = None
    if rank() == 0:
        part = folder / f"{RESULT}.part"
        part.write_bytes(cloudpickle.dumps(result))
        os.replace(part, folder / RESULT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
