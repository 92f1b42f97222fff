"""Checks that all workers are given the same files, of which each then reads its share.

Of files that were sharded by hand, each worker would read only a share of its share.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

from tfdist.errors import ProgramMismatchError
from tfdist.internals.tensorflow import dataset_sources
from tfdist.strategies.group import Group


def check_same_files(group: Group, dataset: Any) -> None:
    """Compares the names of a dataset's files, without their folders; called by all workers.

    Raises:
        ProgramMismatchError: the workers were given different files, or the same in another order.
    """
    sources = group.exchange("files", ", ".join(map(_described, dataset_sources(dataset))))
    for rank, source in enumerate(sources):
        if source != sources[0]:
            workers = group.topology.workers
            raise ProgramMismatchError(
                f"The workers read different data: {workers[0]} has {sources[0]} where "
                f"{workers[rank]} has {source}. Every worker must be given all files, in the same "
                "order, and reads its share of them: don't shard the data by hand, and sort the "
                "names of files. To shard files by hand, set the auto_shard_policy in the "
                "dataset's options to OFF."
            )


def _described(source: Any) -> str:
    if not isinstance(source, list):
        return f"shard {source}"
    names = [os.path.basename(name) for name in source]
    checksum = zlib.crc32("\n".join(names).encode())
    return (
        f"{len(names)} files from {names[0]!r} on (checksum {checksum:x})" if names else "no files"
    )
