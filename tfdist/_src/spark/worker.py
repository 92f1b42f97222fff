"""Runs the function of one worker: `python -m tfdist._src.spark.worker FOLDER`.

Each function runs in a process of its own. So no state remains when Spark begins the next training
run in the same Python process.
"""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

from tfdist._src.cluster.this_worker import rank
from tfdist._src.spark.program import FUNCTION, RESULT


def main(folder: Path) -> None:
    """Calls the function, and saves its return value on rank 0."""
    function, args, kwargs = pickle.loads((folder / FUNCTION).read_bytes())
    try:
        result = function(*args, **kwargs)
    except SystemExit as end:
        if end.code:
            raise
        result = None
    if rank() == 0:
        part = folder / f"{RESULT}.part"
        part.write_bytes(_pickled(result))
        os.replace(part, folder / RESULT)


def _pickled(result: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise SystemExit(
            f"The function's result, a {type(result).__name__}, cannot be sent to the driver "
            f"({error}): return numbers, arrays, lists or dicts of them, or a Keras model"
        ) from error


if __name__ == "__main__":
    main(Path(sys.argv[1]))
