"""The GPUs of this host, how they reach each other, and what sums gradients on them."""

from __future__ import annotations

import re

from tfdist._src.launch.commands.doctor import links
from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.launch.job.gpus import visible_gpus
from tfdist._src.native import gpu_kernels, gpu_links, nvidia, nvrtc
from tfdist._src.options import NativeOptions, Options
from tfdist.errors import NativeUnavailableError

# See csrc/device/cuda.h and nccl.h.
_OLDEST_DRIVER, _OLDEST_NCCL = (12, 0), (2, 21)
# See csrc/device/kernels/staging.h.
_MOST_GPUS = 16
_SECONDS = 60.0
_WAYS = {"own": "by own kernels", "nccl": "by NCCL", "host": "through the host's memory"}
_USE = 'so with several workers, or communication="native"; else by TensorFlow\'s NCCL'
# See docs/gpu.md.
_UNMEASURED = "training on several GPUs, NVLink, several hosts, InfiniBand"


def check(context: Context) -> Section:
    """Asks the driver, NCCL and NVRTC, and copies between GPUs, if there are several.

    Args:
        context: the time limit is 60 seconds by default, for all copies together.
    """
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
    no_nccl = _add_nccl(section, options)
    no_kernels = _add_kernels(section, native_options, devices[0].architecture)
    seconds = _SECONDS if context.timeout is None else context.timeout
    tried = gpu_links.measure(options.cuda_library, len(devices), seconds) if devices[1:] else []
    links.add(section, tried)
    if len(devices) > _MOST_GPUS:
        no_kernels = no_kernels or f"there are more than {_MOST_GPUS} GPUs"
    _add_choice(section, options, no_kernels or links.obstacle(tried), no_nccl)
    if len(devices) == 1:
        section.add("", "a single GPU is seen here: whether it reaches others is not tried")
    return section


def _add_choice(section: Section, options: Options, no_kernels: str, no_nccl: str) -> None:
    """Adds what a job would do, as `csrc/device/device_path.cc` chooses."""
    lacks = {"own": no_kernels, "nccl": no_nccl, "host": ""}
    if (forced := options.device_algorithm) in lacks:
        chosen = f"{_WAYS[forced]}, as TFDIST_DEVICE_ALGORITHM says"
        if lacks[forced]:
            section.problems.append(
                f"TFDIST_DEVICE_ALGORITHM={forced} cannot be had, since {lacks[forced]}: unset it"
            )
    elif not no_kernels and not no_nccl:
        sizes = "up to 256 KiB" if forced else "up to a size that is measured at the start"
        chosen = f"by own kernels {sizes}, else by NCCL"
    elif not no_kernels:
        chosen = f"by own kernels, since {no_nccl}"
    elif not no_nccl:
        chosen = f"by NCCL, since {no_kernels}"
    else:
        chosen = f"through the host's memory, since {no_kernels}, and {no_nccl}"
    section.add("all-reduces", chosen)
    section.add("", _USE)
    section.add("", f"not measured by the project: {_UNMEASURED}")


def _add_nccl(section: Section, options: Options) -> str:
    """Adds what there is, and returns why it is not used; "" if it is."""
    path = options.nccl_library or nvidia.nccl()
    try:
        version = nvidia.nccl_version(path)
    except NativeUnavailableError as error:
        section.add("NCCL", f"none ({error})")
        return "there is no NCCL"
    section.add("NCCL", f"{version}, {path}")
    if _numbers(version) < _OLDEST_NCCL:
        section.problems.append(
            f"NCCL {version} ({path}) is not supported: pip install 'nvidia-nccl-cu12>=2.21'"
        )
        return "NCCL is too old"
    if options.tls:
        section.add("", "not used with TLS, since it sends in the clear")
        return "NCCL sends in the clear, and TLS is set"
    return ""


def _add_kernels(section: Section, options: NativeOptions, architecture: str) -> str:
    """Adds where they come from, and returns why there are none; "" if there are."""
    if found := gpu_kernels.find(architecture, options):
        section.add("kernels", f"compiled: {found}")
        return ""
    try:
        compiler = nvrtc.find()
    except NativeUnavailableError as error:
        section.add("kernels", f"none: {error}")
        return "there are no compiled kernels"
    section.add("kernels", f"to be compiled by {compiler}, {compiler.path}")
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
