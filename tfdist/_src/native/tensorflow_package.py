"""The compile and link flags of the installed TensorFlow, found without importing it.

Importing TensorFlow takes seconds, which the launcher avoids when it builds before its workers
start. A test compares the flags with those of `tf.sysconfig`.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import NativeUnavailableError

# Identical in all supported versions. A mismatch would fail when the ops are loaded: symbol names
# depend on the first, and TensorFlow's build sets the second for every processor.
_DEFINES = ("-D_GLIBCXX_USE_CXX11_ABI=1", "-DEIGEN_MAX_ALIGN_BYTES=64")
_FRAMEWORK = "libtensorflow_framework.so.2"
# Distributions that contain the package `tensorflow`, unlike its companions (tensorflow_hub).
_METADATA = re.compile(
    r"(?:tensorflow|tensorflow_cpu|tensorflow_gpu|tensorflow_intel|tensorflow_cpu_aws"
    r"|tensorflow_rocm|intel_tensorflow|tf_nightly|tf_nightly_cpu)-(?P<version>[^-]+)"
    r"\.(?:dist|egg)-info"
)


@dataclass(frozen=True)
class TensorFlowPackage:
    """The installed TensorFlow.

    Attributes:
        folder: the directory with its headers and libraries.
        version: the version of its distribution.
    """

    folder: Path
    version: str

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros with which code that includes its headers must be compiled."""
        return _DEFINES

    @property
    def includes(self) -> tuple[str, ...]:
        """The include flags, as system headers to suppress their warnings."""
        return ("-isystem", str(self.folder / "include"))

    @property
    def link_flags(self) -> tuple[str, ...]:
        """The flags to link ops with."""
        return (f"-L{self.folder}", f"-l:{_FRAMEWORK}")


def find() -> TensorFlowPackage:
    """Finds the TensorFlow that `import tensorflow` would import.

    Raises:
        NativeUnavailableError: it is missing or incomplete.

    Example:
        >>> find().version  # doctest: +SKIP
        '2.21.0'
    """
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        raise NativeUnavailableError(
            "TensorFlow is not installed for this Python: pip install tensorflow."
        )
    folder = Path(spec.origin).parent
    framework = folder / _FRAMEWORK
    if not framework.exists():
        raise NativeUnavailableError(
            f"The TensorFlow in {folder} has no {_FRAMEWORK}: reinstall it with pip."
        )
    versions = sorted(
        match["version"]
        for entry in folder.parent.iterdir()
        if (match := _METADATA.fullmatch(entry.name))
    )
    # A TensorFlow without metadata is identified by the size of its library.
    return TensorFlowPackage(folder, "+".join(versions) or f"unknown-{framework.stat().st_size}")
