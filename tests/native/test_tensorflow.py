"""Against the installed TensorFlow: its flags, ops, and the real sources."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.harness.tiers import exhaustive
from tests.native.conftest import write
from tfdist._src.native import compilation

# The core is called when the ops are loaded.
OP = """
#include "tensorflow/core/framework/op.h"
extern "C" int tiny();
static const int called = tiny();
REGISTER_OP("TfdistTiny").Output("y: int32").Attr("called: int = " + std::to_string(called));
"""

LOAD_OPS = """
import sys
from tfdist._src import native
ops = native.load_ops()
print(ops.tfdist_tiny.__name__, native.load_ops() is ops, native.load() is native.load())
"""


def test_the_flags_are_those_of_tensorflow():
    import tensorflow as tf

    package = compilation.find_tensorflow()
    assert package.version == tf.__version__
    include = [f"-I{package.includes[1]}", "--std=c++17"]
    assert sorted(tf.sysconfig.get_compile_flags()) == sorted([*include, *package.defines])
    assert tf.sysconfig.get_link_flags() == list(package.link_flags)


def test_the_search_imports_nothing_heavy(python, installation):
    program = (
        "import sys; from tfdist._src.native import compilation; compilation.find_tensorflow(); "
        "print('tensorflow' in sys.modules, 'importlib.metadata' in sys.modules)"
    )
    assert python(installation, "-c", program).stdout == "False False\n"


@exhaustive
@pytest.mark.timeout(1800)
def test_ops_are_built_loaded_and_found_by_tensorflow(python, installation):
    write(installation / "tfdist" / "csrc", {"tf/ops.cc": OP})
    built = python(installation, "-m", "tfdist", "build")
    assert built.returncode == 0, built.stderr
    assert [line.rpartition("/")[2] for line in built.stdout.splitlines()[1:]] == [
        "libtfdist_core.so",
        "libtfdist_ops.so",
    ]
    ops = built.stdout.splitlines()[-1].strip()
    entries = subprocess.run(["readelf", "-d", ops], capture_output=True, text=True).stdout
    assert re.search(r"R(UN)?PATH.*\[\$ORIGIN\]", entries)
    loaded = python(installation, "-c", LOAD_OPS)
    assert loaded.stdout == "tfdist_tiny True True\n", loaded.stderr
    write(installation / "tfdist" / "csrc", {"tf/ops.cc": "int gone();\nint here = gone();\n"})
    failed = python(installation, "-c", LOAD_OPS)
    assert "NativeUnavailableError: TensorFlow 2." in failed.stderr
    assert "run tfdist build --force" in failed.stderr
