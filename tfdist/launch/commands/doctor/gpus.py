"""The GPUs of this host, and what sums gradients on them."""

from __future__ import annotations

import re

from tfdist.errors import NativeUnavailableError
from tfdist.launch.commands.doctor.section import Context, Section
from tfdist.launch.job.gpus import visible_gpus
from tfdist.native import gpu_kernels, nvidia, nvrtc
from tfdist.options import NativeOptions, Options

# See csrc/device/cuda.h and nccl.h.
_OLDEST_DRIVER, _OLDEST_NCCL = (12, 0), (2, 21)
_USE = 'with communication="native" and one GPU per worker'


def check(context: Context) -> Section:
    """Asks the driver, NCCL and NVRTC; no GPU is used."""
    try:
        options = Options.from_environment(dict(context.environment))
        native_options = NativeOptions.from_environment(dict(context.environment))
    except ValueError:
        return Section([("GPUs", "not looked for")])  # As the settings say.
    try:
        driver = nvidia.Driver(options.cuda_library)
        devices = driver.devices()
    except NativeUnavailableError as error:
        expected = visible_gpus(context.environment) or options.cuda_library
        section = Section([("GPUs", "none")])
        if expected:
            section.problems.append(
                f"GPUs cannot be used ({error}): install NVIDIA's driver, or start the container "
                "with its GPUs"
            )
        return section
    if not devices:
        return Section([("GPUs", "none visible")])
    section = Section()
    for number, device in enumerate(devices):
        section.add(f"GPU {number}", f"{device.name}, {device.architecture}")
    section.add("driver", f"for CUDA {driver.version}")
    if _numbers(driver.version) < _OLDEST_DRIVER:
        section.problems.append(
            f"The GPUs' driver is for CUDA {driver.version}: install one for CUDA 12.0 or newer"
        )
    nccl = _add_nccl(section, options)
    kernels = _add_kernels(section, native_options, devices[0].architecture)
    ways = [name for name, there in (("own kernels", kernels), ("NCCL", nccl)) if there]
    chosen = options.device_algorithm or ", ".join([*ways, "host memory"])
    section.add("gradients", f"{chosen}, {_USE}; else TensorFlow's NCCL")
    return section


def _add_nccl(section: Section, options: Options) -> bool:
    path = options.nccl_library or nvidia.nccl()
    try:
        version = nvidia.nccl_version(path)
    except NativeUnavailableError as error:
        section.add("NCCL", f"none ({error})")
        return False
    section.add("NCCL", f"{version}, {path}")
    if _numbers(version) < _OLDEST_NCCL:
        section.problems.append(
            f"NCCL {version} ({path}) is not supported: pip install 'nvidia-nccl-cu12>=2.21'"
        )
        return False
    if options.tls:
        section.add("", "not used with TLS, since it sends in the clear")
    return not options.tls


def _add_kernels(section: Section, options: NativeOptions, architecture: str) -> bool:
    if found := gpu_kernels.find(architecture, options):
        section.add("kernels", f"compiled: {found}")
        return True
    try:
        compiler = nvrtc.find()
    except NativeUnavailableError as error:
        section.add("kernels", f"none: {error}")
        return False
    section.add("kernels", f"to be compiled by {compiler}, {compiler.path}")
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
