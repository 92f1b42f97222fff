"""The installed TensorFlow as a compiler sees it, found without importing it.

Importing TensorFlow takes seconds, and the launcher, which builds ahead of its workers, does
without it. A test holds the flags to `tf.sysconfig`'s.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import NativeUnavailableError

# The same in all supported versions. Another value would show when the ops are loaded: the names
# of the symbols depend on the first, and TensorFlow's build sets the second for every processor.
_DEFINES = ("-D_GLIBCXX_USE_CXX11_ABI=1", "-DEIGEN_MAX_ALIGN_BYTES=64")
_FRAMEWORK = "libtensorflow_framework.so.2"
# Distributions that hold the package `tensorflow`, and none of its companions (tensorflow_hub).
_METADATA = re.compile(
    r"(?:tensorflow|tensorflow_cpu|tensorflow_gpu|tensorflow_intel|tensorflow_cpu_aws"
    r"|tensorflow_rocm|intel_tensorflow|tf_nightly|tf_nightly_cpu)-(?P<version>[^-]+)"
    r"\.(?:dist|egg)-info"
)


@dataclass(frozen=True)
class TensorFlowPackage:
    """The installed TensorFlow.

    Attributes:
        folder: where its headers and libraries are.
        version: as its distribution calls it.
    """

    folder: Path
    version: str

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros that what is compiled against its headers has to share with it."""
        return _DEFINES

    @property
    def includes(self) -> tuple[str, ...]:
        """Where its headers are; their warnings are not ours to mend."""
        return ("-isystem", str(self.folder / "include"))

    @property
    def link_flags(self) -> tuple[str, ...]:
        """What to link ops with."""
        return (f"-L{self.folder}", f"-l:{_FRAMEWORK}")


def find() -> TensorFlowPackage:
    """Finds the TensorFlow that `import tensorflow` would import.

    Raises:
        NativeUnavailableError: there is none, or it is incomplete.

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
            f"The TensorFlow in {folder} has no {_FRAMEWORK}: install it again with pip."
        )
    versions = sorted(
        match["version"]
        for entry in folder.parent.iterdir()
        if (match := _METADATA.fullmatch(entry.name))
    )
    # A TensorFlow without metadata is told from others by the size of its library.
    return TensorFlowPackage(folder, "+".join(versions) or f"unknown-{framework.stat().st_size}")
