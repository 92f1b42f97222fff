"""Finds the resources that communicators need on GPUs: GPU numbers, kernels and NCCL."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdist._src import native
from tfdist._src.log import logger
from tfdist._src.native import gpu_kernels, nvidia
from tfdist._src.options import NativeOptions, Options
from tfdist.errors import NativeUnavailableError


@dataclass(frozen=True)
class Gpu:
    """A GPU of this process, and the resources that a communicator needs there.

    Attributes:
        device: the name of the GPU in TensorFlow.
        number: the index of the GPU among the GPUs that `CUDA_VISIBLE_DEVICES` makes visible.
        kernels: the path of the file with the kernels compiled for this GPU; "" if there is no such
            file.
        nccl: the path or name of NCCL's library; "" if NCCL must not be used.
    """

    device: str
    number: int
    kernels: str
    nccl: str


def obstacle(devices: Sequence[str], options: Options) -> str:
    """Returns the reason why one of these GPUs cannot be used; "" if all can be used."""
    core = native.load().library
    for number in _numbers(devices):
        if core.tfd_check_gpu(number, os.fsencode(options.cuda_library)):
            return str(core.tfd_error().decode(errors="replace"))
    return ""


def find(devices: Sequence[str], options: Options) -> list[Gpu]:
    """Finds the resources for GPUs of this process, and compiles the kernels if necessary.

    If the kernels cannot be compiled, for example because NVRTC is missing, a warning is logged,
    and `Gpu.kernels` is "".

    Args:
        devices: the names of the GPUs in TensorFlow.
        options: the settings.
    """
    numbers = _numbers(devices)
    kernels = {number: _kernels(number, options) for number in set(numbers)}
    # NCCL cannot encrypt its traffic, so it is not used if the job requires TLS.
    nccl = "" if options.tls else options.nccl_library or nvidia.nccl()
    return [
        Gpu(device, number, kernels[number], nccl)
        for device, number in zip(devices, numbers, strict=True)
    ]


def _numbers(devices: Sequence[str]) -> list[int]:
    """Returns the driver's number of the GPU for each device.

    Several logical devices of TensorFlow may be parts of the same GPU.
    """
    numbers = []
    for gpu in tf.config.get_visible_devices("GPU"):
        parts = tf.config.get_logical_device_configuration(gpu) or [None]
        numbers += [int(gpu.name.rsplit(":", 1)[-1])] * len(parts)
    names = [device.name for device in tf.config.list_logical_devices("GPU")]
    unknown = [device for device in devices if device not in names]
    if unknown:
        raise ValueError(
            f"A device must be one of the GPUs {', '.join(names)}. Received: {unknown[0]}."
        )
    return [numbers[names.index(device)] for device in devices]


def _kernels(number: int, options: Options) -> str:
    try:
        architecture = nvidia.Driver(options.cuda_library).devices()[number].architecture
        native_options = NativeOptions.from_environment()
        found = gpu_kernels.find(architecture, native_options)
        return str(found or gpu_kernels.ensure([architecture], native_options)[0].path)
    except (NativeUnavailableError, OSError) as error:
        logger.warning(f"no kernels for this GPU, so NCCL or the host sums its gradients: {error}")
        return ""
