"""The GPU of a process with one: its number, the kernels compiled for it, and NCCL."""

from __future__ import annotations

import os
from dataclasses import dataclass

import tensorflow as tf

from tfdist import native
from tfdist.cluster.net.wait_messages import say
from tfdist.errors import NativeUnavailableError
from tfdist.native import gpu_kernels, nvidia
from tfdist.options import NativeOptions, Options


@dataclass(frozen=True)
class Gpu:
    """What a communicator needs to work in a GPU's memory.

    Attributes:
        device: TensorFlow's name of it.
        number: of the GPU, among those that `CUDA_VISIBLE_DEVICES` lets this process see.
        kernels: the file with the kernels compiled for it; "" for none.
        nccl: NCCL's library, a path or a name; "" for none.
    """

    device: str
    number: int
    kernels: str
    nccl: str


def obstacle(options: Options) -> str:
    """Why the GPU of this process cannot be used; "" if it can."""
    number = _number(tf.config.get_visible_devices("GPU")[0])
    core = native.load().library
    if core.tfd_check_gpu(number, os.fsencode(options.cuda_library)):
        return str(core.tfd_error().decode(errors="replace"))
    return ""


def find(options: Options) -> Gpu:
    """The GPU that TensorFlow uses in this process; compiles its kernels if necessary.

    Without NVRTC, or a folder for what it makes, there are no kernels, which is announced.
    """
    number = _number(tf.config.get_visible_devices("GPU")[0])
    return Gpu(
        device=tf.config.list_logical_devices("GPU")[0].name,
        number=number,
        kernels=_kernels(number, options),
        # NCCL sends in the clear.
        nccl="" if options.tls else options.nccl_library or nvidia.nccl(),
    )


def _number(gpu: tf.config.PhysicalDevice) -> int:
    return int(gpu.name.rsplit(":", 1)[-1])


def _kernels(number: int, options: Options) -> str:
    try:
        architecture = nvidia.Driver(options.cuda_library).devices()[number].architecture
        native_options = NativeOptions.from_environment()
        found = gpu_kernels.find(architecture, native_options)
        return str(found or gpu_kernels.ensure([architecture], native_options)[0].path)
    except (NativeUnavailableError, OSError) as error:
        say(f"tfdist: no kernels for this GPU, so NCCL or the host sums its gradients: {error}")
        return ""
