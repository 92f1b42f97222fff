"""Doctor's checks of this host: cores, memory, GPUs and their links."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.launch.job.resources import available_cores, visible_gpus
from tfdist._src.native import gpu_kernels, nvidia
from tfdist._src.native.nvidia import Copy, Link
from tfdist._src.options import NativeOptions, Options
from tfdist.errors import NativeUnavailableError

_GIB = 1 << 30
_SHARED_MEMORY = "/dev/shm"
# The files that contain the memory limit of a container, for version 2 and version 1 of cgroups.
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_host(context: Context) -> Section:
    """Reports the resources of this host."""
    section = Section()
    section.add("cores", f"{available_cores()} of {os.cpu_count()}")
    section.add("memory", _memory())
    if os.path.isdir(_SHARED_MEMORY):
        free = shutil.disk_usage(_SHARED_MEMORY).free
        section.add("shared memory", f"{free / _GIB:.1f} GiB free in {_SHARED_MEMORY}")
    gpus = visible_gpus(context.environment)
    section.add("GPUs", ", ".join(gpus) if gpus else "none visible")
    return section


def _memory() -> str:
    """Describes the host's total and available memory, and the container's memory limit, if any."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return "unknown"
    text = f"{total / _GIB:.1f} GiB, {free / _GIB:.1f} GiB available"
    for path in _MEMORY_LIMITS:
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):
            continue
        if limit < total:
            text += f", limited to {limit / _GIB:.1f} GiB"
    return text


_DEVICES_SECONDS = 60.0
_PROGRAM = """
import json
import tensorflow as tf
names = [device.name for device in tf.config.list_physical_devices()]
print(json.dumps([name.removeprefix("/physical_device:") for name in names]))
"""


def check_devices(context: Context, program: str = _PROGRAM) -> Section:
    """Lists the devices that TensorFlow sees.

    The check imports TensorFlow in a separate process, and kills this process after a time limit.

    Args:
        context: `timeout` is the time limit; 60 seconds by default.
        program: the Python code to run in the process. The last line that it prints must be a JSON
            list of device names.
    """
    seconds = _DEVICES_SECONDS if context.timeout is None else context.timeout
    environment = {**context.environment, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("TF_CONFIG", None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
        if done.returncode != 0:
            return _cannot(
                (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            )
        names = [str(name) for name in json.loads(done.stdout.strip().splitlines()[-1])]
    except subprocess.TimeoutExpired:
        return Section(
            [("TensorFlow", f"no answer in {seconds:.0f} s")],
            [
                f"Importing TensorFlow took longer than {seconds:.0f} s: try tfdist doctor "
                f"--timeout {2 * seconds:.0f}; if that fails too, check this host's load, disk "
                f"and GPU driver"
            ],
        )
    except (ValueError, IndexError):
        return _cannot("its output could not be read")
    section = Section([("TensorFlow", ", ".join(names))])
    if visible_gpus(context.environment) and not any(name.startswith("GPU") for name in names):
        section.problems.append(
            "This host has GPUs but TensorFlow sees none: pip install 'tensorflow[and-cuda]', "
            "and check the driver with nvidia-smi"
        )
    return section


def _cannot(reason: str) -> Section:
    return Section(
        [("TensorFlow", "cannot list devices")],
        [f"TensorFlow does not work ({reason}): reinstall it, and tfdist with it"],
    )


_WIDTH = 8
_SHOWN = 4  # The maximum number of GPU pairs that a problem lists.
_PROBLEMS = {
    Copy.WRONG: "{pairs}: data copied from the second GPU is corrupted on arrival: turn off PCIe "
    "access control (ACS) and the IOMMU in the BIOS, or set NCCL_P2P_DISABLE=1",
    Copy.STUCK: "{pairs}: a copy from the second GPU does not finish: the link is broken, and the "
    "kernel's log may show the cause (dmesg | grep Xid); CUDA_VISIBLE_DEVICES can exclude a GPU",
    Copy.FAILED: "{pairs}: no copy from the second GPU ({error}): see nvidia-smi, or try a "
    "longer --timeout",
}


def add(section: Section, links: Sequence[Link]) -> None:
    """Adds to the section how fast the GPUs copy data from each other, and problems with copies.

    If there is only one GPU, `links` is empty, and nothing is added.
    """
    if not links:
        return
    gpus = sorted({link.reader for link in links})
    by_pair = {(link.reader, link.owner): link for link in links}
    section.add("copies", "GB/s at which the GPU of a row reads the memory of a column's")
    section.add("", "".join(f"{gpu:>{_WIDTH}}" for gpu in gpus))
    for reader in gpus:
        cells = ("-" if reader == owner else _cell(by_pair[reader, owner]) for owner in gpus)
        section.add(f"{reader:>14}", "".join(f"{cell:>{_WIDTH}}" for cell in cells))
    if any(link.copy is Copy.INTACT and not link.direct for link in links):
        section.add("", "(in parentheses: through the host's memory)")
    if any(link.copy is Copy.TAKEN for link in links):
        section.add("", "(taken: not tried, since another process uses the GPU)")
    _add_kinds(section, links)
    _add_problems(section, links)


def obstacle(links: Sequence[Link]) -> str:
    """Returns why some GPU cannot read another GPU's memory directly; "" if all GPUs can.

    tfdist's own kernels can be used only if all GPUs can.
    """
    for link in links:
        pair = f"GPU {link.reader}", f"GPU {link.owner}'s memory"
        if link.copy is Copy.WRONG:
            return "{} reads wrong data from {}".format(*pair)
        if link.copy in (Copy.STUCK, Copy.FAILED):
            return "{} cannot read {}".format(*pair)
        if not link.direct:
            return "{} does not reach {}".format(*pair)
    return ""


def _cell(link: Link) -> str:
    if link.copy is not Copy.INTACT:
        return str(link.copy.value)
    speed = f"{link.speed / 1e9:.0f}" if link.speed >= 1e10 else f"{link.speed / 1e9:.1f}"
    return speed if link.direct else f"({speed})"


def _add_kinds(section: Section, links: Sequence[Link]) -> None:
    kinds: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        if link.rank is not None and link.direct:
            atomics = "atomics, as over NVLink" if link.atomics else "no atomics, as over PCIe"
            kinds[f"{atomics}; the driver's rank {link.rank}"].append(link)
    for number, (kind, found) in enumerate(sorted(kinds.items())):
        pairs = "all" if len(found) == len(links) else _pairs(found)
        section.add("" if number else "links", f"{pairs}: {kind}")


def _add_problems(section: Section, links: Sequence[Link]) -> None:
    for copy, text in _PROBLEMS.items():
        if found := [link for link in links if link.copy is copy]:
            problem = text.format(pairs=f"GPUs {_pairs(found)}", error=found[0].error)
            section.problems.append(problem)


def _pairs(links: Sequence[Link]) -> str:
    shown = ", ".join(f"{link.reader}-{link.owner}" for link in links[:_SHOWN])
    more = len(links) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


# See csrc/device/gpu.h and nccl.h.
_OLDEST_DRIVER, _OLDEST_NCCL = (12, 0), (2, 21)
# See csrc/device/kernels/staging.h.
_MAX_GPUS = 16
_SECONDS = 60.0
_WAYS = {"p2p": "by own kernels", "nccl": "by NCCL", "host": "through the host's memory"}
_USE = 'so with several workers, or communication="native"; else by TensorFlow\'s NCCL'
# See docs/guide/gpus.md.
_UNMEASURED = "training on several GPUs, NVLink, several hosts, InfiniBand"


def check_gpus(context: Context) -> Section:
    """Checks the GPUs, their driver, NCCL and NVRTC.

    If this host has several GPUs, the check also copies data between each two of them.

    Args:
        context: `timeout` is the time limit for all copies together; 60 seconds by default.
    """
    try:
        options = Options.from_environment(dict(context.environment))
        native_options = NativeOptions.from_environment(dict(context.environment))
    except ValueError:
        # `check_settings` reports the invalid setting.
        return Section([("GPUs", "not checked")])
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
    tried = nvidia.measure(options.cuda_library, len(devices), seconds) if devices[1:] else []
    add(section, tried)
    if len(devices) > _MAX_GPUS:
        no_kernels = no_kernels or f"there are more than {_MAX_GPUS} GPUs"
    _add_choice(section, options, no_kernels or obstacle(tried), no_nccl)
    if len(devices) == 1:
        section.add("", "only one GPU is visible, so connections to other GPUs are not tested")
    return section


def _add_choice(section: Section, options: Options, no_kernels: str, no_nccl: str) -> None:
    """Adds to the section how a job on this host would run all-reduces of GPU tensors.

    The choice follows the rules of `csrc/device/device_path.cc`.

    Args:
        section: the section to extend.
        options: `device_algorithm` is the user's choice, if any.
        no_kernels: why tfdist's own kernels cannot be used; "" if they can.
        no_nccl: why NCCL cannot be used; "" if it can.
    """
    lacks = {"p2p": no_kernels, "nccl": no_nccl, "host": ""}
    if (forced := options.device_algorithm) in lacks:
        chosen = f"{_WAYS[forced]}, as TFDIST_DEVICE_ALGORITHM requires"
        if lacks[forced]:
            section.problems.append(
                f"TFDIST_DEVICE_ALGORITHM={forced} cannot be used, since {lacks[forced]}: unset it"
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
    """Adds NCCL's version to the section; returns why NCCL cannot be used, or "" if it can."""
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
    """Adds to the section where the compiled GPU kernels are, or which compiler would compile them.

    Returns:
        Why the kernels cannot be used, if they are not compiled and there is no compiler; "" if
        they can be used.
    """
    if found := gpu_kernels.find(architecture, options):
        section.add("kernels", f"compiled: {found}")
        return ""
    try:
        compiler = gpu_kernels.find_nvrtc()
    except NativeUnavailableError as error:
        section.add("kernels", f"none: {error}")
        return "there are no compiled kernels"
    section.add("kernels", f"to be compiled by {compiler}, {compiler.path}")
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
