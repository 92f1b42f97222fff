"""Converts a mesh, GPUs and the settings to the native core's setup."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from tfdist._src.cluster import Mesh
from tfdist._src.comm.gpu import Gpu
from tfdist._src.native.api import Setup
from tfdist._src.options import Options


def setup_of(mesh: Mesh, options: Options, gpus: Sequence[Gpu] = ()) -> Setup:
    """The core's setup for a connected rank, with GPUs or none."""

    def integers(values: Sequence[int]) -> Any:
        return (ctypes.c_int * len(values))(*values)

    def texts(values: Sequence[bytes]) -> Any:
        return (ctypes.c_char_p * len(values))(*values)

    return Setup(
        name=mesh.name.encode(),
        rank=mesh.rank,
        size=mesh.size,
        ranks=texts([name.encode() for name in mesh.ranks]),
        hosts=integers(mesh.hosts),
        control=integers(mesh.control),
        data=integers(mesh.data),
        segment=mesh.segment,
        segment_bytes=mesh.segment_bytes,
        silence_warning_seconds=options.silence_warning,
        silence_timeout_seconds=options.link_timeout,
        stall_seconds=options.stall_warning,
        timeout_seconds=options.collective_timeout,
        start_seconds=options.start_timeout,
        algorithm=options.algorithm.encode(),
        tls_certificate=os.fsencode(options.tls_certificate),
        tls_key=os.fsencode(options.tls_key),
        tls_ca=os.fsencode(options.tls_ca),
        tls_secret=options.secret.encode(errors="surrogateescape"),
        gpus=len(gpus),
        gpu_numbers=integers([gpu.number for gpu in gpus]),
        gpu_kernels=texts([os.fsencode(gpu.kernels) for gpu in gpus]),
        cuda_library=os.fsencode(options.cuda_library),
        nccl_library=os.fsencode(gpus[0].nccl if gpus else ""),
        device_algorithm=options.device_algorithm.encode(),
        device_buffer_bytes=options.device_buffers,
    )
