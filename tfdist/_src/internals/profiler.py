"""The file format of TensorFlow's profiler, whose classes TensorFlow does not export."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tensorflow.tsl.profiler.protobuf import xplane_pb2

__all__ = ["ProfiledOp", "read_threads"]

_DEVICE = "/device:"
_PICOSECONDS = 1000  # in a nanosecond


class ProfiledOp(NamedTuple):
    """One run of an operation, or of a GPU's kernel.

    Attributes:
        name: `name:type` of an operation; a kernel's name.
        begin: nanoseconds since 1970.
        end: nanoseconds since 1970.
    """

    name: str
    begin: int
    end: int


def read_threads(profile: bytes) -> Iterator[tuple[str, list[ProfiledOp]]]:
    """The operations in a profile, for each thread and each stream of a device that ran some.

    Args:
        profile: the content of an `.xplane.pb` file.

    Returns:
        Names of thread pools and streams, which several may share, with what ran there.

    Raises:
        google.protobuf.message.DecodeError: it is no such file.
    """
    space = xplane_pb2.XSpace()
    space.ParseFromString(profile)
    start = _start(space)
    for plane in space.planes:
        is_device = plane.name.startswith(_DEVICE)
        for line in plane.lines:
            ops = []
            for event in line.events:
                about = plane.event_metadata[event.metadata_id]
                # Other events of the host are TensorFlow's own functions.
                if is_device or (
                    about.display_name and about.name.endswith(f":{about.display_name}")
                ):
                    begin = start + line.timestamp_ns + event.offset_ps // _PICOSECONDS
                    end = begin + event.duration_ps // _PICOSECONDS
                    ops.append(ProfiledOp(about.name, begin, end))
            if ops:
                pool = line.name.partition("/")[0]
                yield (
                    (f"{plane.name.removeprefix(_DEVICE)} {line.name}" if is_device else pool),
                    ops,
                )


def _start(space: xplane_pb2.XSpace) -> int:
    """When the profiler was started, from which its times count."""
    for plane in space.planes:
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                return int(stat.uint64_value)
    return 0
