"""`tfdist manifest`: prints the objects of Kubernetes that run a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist._src.launch.manifest.indexed_job import indexed_job
from tfdist._src.launch.manifest.jobset import jobset
from tfdist._src.launch.manifest.options import ManifestOptions, parse
from tfdist._src.launch.manifest.tfjob import tfjob
from tfdist._src.launch.manifest.yaml_text import to_yaml

_OBJECTS: dict[str, Callable[[ManifestOptions], list[dict[str, Any]]]] = {
    "job": indexed_job,
    "jobset": jobset,
    "tfjob": tfjob,
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: the command line, without `tfdist manifest`.

    Returns:
        0.

    Raises:
        SystemExit: on a usage error (code 2), or after printing the help (code 0).
    """
    options = parse(arguments, tuple(_OBJECTS))
    print("---\n".join(to_yaml(made) for made in _OBJECTS[options.kind](options)), end="")
    return 0
