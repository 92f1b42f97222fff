"""Communicators whose ranks are threads of this process, such as those of its devices."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist._src import native
from tfdist._src.cluster import Mesh
from tfdist._src.cluster.mesh.mesh import connect_threads
from tfdist._src.comm.native_communicator import NativeCommunicator, open_mesh
from tfdist._src.options import Options


def open_local_communicators(
    name: str, ranks: Sequence[str], options: Options
) -> list[NativeCommunicator]:
    """Connects ranks that are threads of this process.

    Args:
        name: the group's name.
        ranks: the name of each rank in messages.
        options: the settings.

    Returns:
        The communicator of each rank.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded here.
        OSError: out of memory or file descriptors.
        ValueError: `TFDIST_ALGORITHM` is not the name of an algorithm.
    """
    meshes = _connected(name, ranks)
    try:
        return [open_mesh(mesh, options) for mesh in meshes]
    finally:
        for mesh in meshes:
            mesh.close()  # Frees those without a communicator after an error.


def reopen_local_communicators(
    communicators: Sequence[NativeCommunicator], name: str, ranks: Sequence[str], options: Options
) -> None:
    """Connects them once more, which have been closed, under the same names.

    Raises:
        As `open_local_communicators`.
    """
    meshes = _connected(name, ranks)
    try:
        for communicator, mesh in zip(communicators, meshes, strict=True):
            communicator.context.open(mesh, options, None)
    finally:
        for mesh in meshes:
            mesh.close()


def _connected(name: str, ranks: Sequence[str]) -> list[Mesh]:
    return connect_threads(name, ranks, native.load().library.tfd_segment_bytes)
