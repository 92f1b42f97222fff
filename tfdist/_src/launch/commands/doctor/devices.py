"""The devices that TensorFlow sees, queried in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys

from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.launch.job.gpus import visible_gpus

_SECONDS = 60.0
_PROGRAM = """
import json
import tensorflow as tf
names = [device.name for device in tf.config.list_physical_devices()]
print(json.dumps([name.removeprefix("/physical_device:") for name in names]))
"""


def check(context: Context, program: str = _PROGRAM) -> Section:
    """Imports TensorFlow in a separate process, with a time limit.

    Args:
        context: the time limit is 60 seconds by default.
        program: the code to run; its last line of output is a JSON list of names.
    """
    seconds = _SECONDS if context.timeout is None else context.timeout
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
