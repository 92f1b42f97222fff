"""What wheels and source archives contain, and that a wheel's own build is used."""

from __future__ import annotations

import tarfile
import zipfile

import pytest

from tests.harness.tiers import exhaustive
from tests.native.conftest import write

pytestmark = exhaustive
pytest.importorskip("setuptools")
pytest.importorskip("wheel")

LOAD = """
from tfdist._src import native
core = native.load()
print(core.library.tiny(), core.build.folder)
"""


def archive(python, installation, kind):
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}('out'))"
    done = python(installation, "-c", program)
    assert done.returncode == 0, done.stderr
    return installation / "out" / done.stdout.splitlines()[-1]


@pytest.fixture
def sources(installation):
    """As in the real sources, some that others include."""
    return write(installation / "tfdist" / "csrc", {"inner/deep/kernels.inc": ""})


def test_a_wheel_with_a_build(installation, sources, python, tmp_path):
    done = python(installation, "-m", "tfdist", "build", "--into-package")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(archive(python, installation, "wheel")) as wheel:
        names = wheel.namelist()
        wheel.extractall(tmp_path / "site")
    sources = {name for name in names if name.startswith("tfdist/csrc/")}
    assert sources == {
        "tfdist/csrc/core.cc",
        "tfdist/csrc/tiny.h",
        "tfdist/csrc/inner/other.cc",
        "tfdist/csrc/inner/deep/kernels.inc",
    }
    built = sorted(name.split("/")[-1] for name in names if "/prebuilt/" in name)
    assert built == ["build.json", "libtfdist_core.so"]
    # Elsewhere, without a compiler, and with nothing in the cache.
    loaded = python(tmp_path / "site", "-c", LOAD, PATH="")
    assert loaded.stdout.startswith(f"1 {tmp_path}/site/tfdist/_src/native/prebuilt/"), (
        loaded.stderr
    )
    assert loaded.stderr == ""


def test_a_wheel_without_a_build(installation, sources, python, tmp_path):
    with zipfile.ZipFile(archive(python, installation, "wheel")) as wheel:
        assert not [name for name in wheel.namelist() if "/prebuilt/" in name]
        wheel.extractall(tmp_path / "site")
    loaded = python(tmp_path / "site", "-c", LOAD)
    assert loaded.stdout.startswith(f"1 {tmp_path}/home/.cache/tfdist/native/"), loaded.stderr


def test_a_source_archive(installation, sources, python):
    with tarfile.open(archive(python, installation, "sdist")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        "tfdist/csrc/core.cc",
        "tfdist/csrc/tiny.h",
        "tfdist/csrc/inner/deep/kernels.inc",
    } <= names
