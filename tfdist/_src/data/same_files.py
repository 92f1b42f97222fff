"""Checks that all workers are given the same files, of which each then reads its share.

Of files that were sharded by hand, each worker would read only a share of its share.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any

from tfdist._src.group.group import Group
from tfdist._src.internals.datasets import dataset_sources
from tfdist.errors import ProgramMismatchError


def describe_files(dataset: Any) -> str:
    """The names of a dataset's files, without their folders, in short: the same on all workers."""
    return ", ".join(map(_described, dataset_sources(dataset)))


def check_same_files(group: Group, described: Sequence[str]) -> None:
    """Checks that all workers were given the same files in the same order.

    Args:
        group: the workers.
        described: `describe_files` of each worker; "" if it does not read a share of files.

    Raises:
        ProgramMismatchError: they were not.
    """
    for rank, files in enumerate(described):
        if files != described[0]:
            workers = group.topology.workers
            chiefs, others = (
                text or "no files to read a share of" for text in (described[0], files)
            )
            raise ProgramMismatchError(
                f"The workers read different data: {workers[0]} has {chiefs} where "
                f"{workers[rank]} has {others}. Every worker must be given all files, in the same "
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
