"""What cannot be compiled or loaded, in the user's words."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from tests.native.conftest import write
from tfdist._src import native
from tfdist._src.native import compilation, loading, store
from tfdist._src.native import compilation as builds
from tfdist._src.native.builder import ensure
from tfdist._src.native.loading import load_core, load_op_library
from tfdist._src.options import NativeOptions
from tfdist.errors import NativeUnavailableError


def refusal(function, *arguments, **settings):
    with pytest.raises(NativeUnavailableError) as raised:
        function(*arguments, **settings)
    return str(raised.value)


def test_a_missing_compiler_is_named_with_the_remedy(source, options, monkeypatch):
    monkeypatch.setenv("PATH", "")
    message = refusal(ensure, options, source)
    assert message.startswith("No C++ compiler was found (looked for g++, c++, clang++). Install")
    assert "tfdist build" in message
    assert "\n" not in message
    assert not options.cache.exists()


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("no-such-compiler -O1", "no-such-compiler -O1, given by CXX, does not work"),
        ("false", "(code 1)"),
        ("g++ 'half", "CXX is not a command (No closing quotation)"),
    ],
)
def test_a_chosen_compiler_that_does_not_work(setting, problem, source, options):
    message = refusal(ensure, dataclasses.replace(options, compiler=setting), source)
    assert problem in message
    assert "\n" not in message


def test_a_compile_error(source, options):
    write(source, {"inner/other.cc": "\n\nint other() { return missing; }\n"})
    message = refusal(ensure, options, source)
    first, *words = message.splitlines()
    assert first.startswith("The native collectives could not be compiled with g++ ")
    assert "CXX to another compiler" in first
    assert any("other.cc:3:22: error: " in line and "missing" in line for line in words)
    assert len(words) <= 6
    log = re.search(r"Full log: (\S+)\.", first)
    assert log
    text = Path(log[1]).read_text()
    assert "-std=c++17" in text
    assert "error:" in text
    # Nothing half-made stays.
    assert {path.suffix for path in (options.cache / "native").iterdir()} == {".log", ""}
    assert not list((options.cache / "native").glob(".unfinished-*"))


def test_a_link_error(source, options):
    write(source, {"inner/other.cc": "int gone(); int other() { return gone(); }\n"})
    assert "gone()" in refusal(ensure, options, source)


def test_a_failure_is_not_repeated_at_once_but_on_request(source, options, capfd, monkeypatch):
    write(source, {"core.cc": "error\n"})
    first = refusal(ensure, options, source)
    capfd.readouterr()
    assert refusal(ensure, options, source) == first
    assert "compiling" not in capfd.readouterr().err
    assert refusal(ensure, options, source, retry=True) == first
    assert "compiling" in capfd.readouterr().err
    log = next((options.cache / "native").glob("*.log"))
    os.utime(log, (0, 0))
    refusal(ensure, options, source)
    assert "compiling" in capfd.readouterr().err


def test_missing_sources_are_named(tmp_path, options):
    assert "sources are missing" in refusal(ensure, options, tmp_path)


def test_a_missing_tensorflow_is_named(source, options, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal(ensure, options, source).startswith("TensorFlow is not installed")
    assert native.status(options, source).problem.startswith("TensorFlow is not installed")


def test_a_holder_is_named_and_not_waited_for_for_ever(source, options, monkeypatch):
    monkeypatch.setattr(store, "_FIRST_SECONDS", 0.0)
    root = options.cache / "native"
    root.mkdir(parents=True)
    lines = []
    with store.held(root / store.LOCK, 1.0, print):
        message = refusal(ensure, options, source, announce=lines.append, seconds=0.3)
    assert re.search(rf"within 0 s by process {os.getpid()} on \S+, which holds {root}", message)
    assert len(lines) == 1
    assert re.fullmatch(
        rf"waiting for process {os.getpid()} on \S+, which is compiling the native collectives "
        r"\[0 s of 0 s\]",
        lines[0],
    )
    assert ensure(options, source)


def test_a_file_system_without_locks(source, options, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(95, "not supported")

    monkeypatch.setattr(store.fcntl, "flock", flock)
    assert ensure(options, source)


def damaged(build):
    """As long as before, and nothing that can be loaded."""
    build.core.write_bytes(b"x" * build.core.stat().st_size)
    return build


def test_a_cached_library_that_does_not_load_is_made_anew(source, options):
    broken = damaged(ensure(options, source))
    core = load_core(options, source)
    assert core.build.stamp != broken.stamp
    assert core.library.tfd_segment_bytes(2) == 7


def test_a_package_library_that_does_not_load_is_passed_over(source, options):
    broken = damaged(ensure(options, source, package=store.PACKAGE))
    core = load_core(options, source)
    assert core.build.folder.parent == options.cache / "native"
    assert broken.folder.exists()
    # And is found from then on.
    assert load_core(options, source).build == core.build


def test_a_new_library_that_does_not_load(source, options, script):
    bad = script(
        '[ "$1" = --version ] && echo "bad 1.0" && exit\n'
        'while [ "$1" != -o ]; do shift; done\necho nonsense > "$2"'
    )
    message = refusal(load_core, dataclasses.replace(options, compiler=bad), source)
    assert message.startswith("The native collectives cannot be loaded: ")
    assert "set TFDIST_CACHE" in message


def test_a_missing_function(source, options):
    write(source, {"core.cc": "int nothing;\n"})
    assert "lacks a function" in refusal(load_core, options, source)


def test_a_build_without_ops_is_refused(source, options):
    assert "no ops for TensorFlow" in refusal(load_op_library, ensure(options, source))


def test_switching_off_is_respected_and_named(monkeypatch):
    monkeypatch.setenv("TFDIST_NATIVE", "0")
    # Another test may have loaded them in this process.
    monkeypatch.setattr(loading, "_core", None)
    monkeypatch.setattr(loading, "_ops", None)
    assert "switched off by TFDIST_NATIVE=0" in refusal(native.load)
    assert "switched off by TFDIST_NATIVE=0" in refusal(native.load_ops)
    assert str(native.status()) == "switched off by TFDIST_NATIVE=0"


def test_the_switch_is_0_or_1():
    with pytest.raises(ValueError, match=r"must be 0 or 1\. Received: 'no'"):
        NativeOptions.from_environment({"TFDIST_NATIVE": "no"})
    assert not NativeOptions.from_environment({"TFDIST_NATIVE": "0"}).enabled
    assert NativeOptions.from_environment({"TFDIST_NATIVE": ""}).enabled


@pytest.mark.parametrize(
    ("environment", "cache"),
    [
        ({"HOME": "/h"}, "/h/.cache/tfdist"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/tfdist"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "relative"}, "/h/.cache/tfdist"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x", "TFDIST_CACHE": "/t"}, "/t"),
    ],
)
def test_the_cache_follows_the_environment(environment, cache):
    assert str(NativeOptions.from_environment(environment).cache) == cache


def test_the_status_says_whether_and_where_it_is_compiled(source, options, monkeypatch):
    before = native.status(options, source)
    assert re.fullmatch(
        r"not compiled yet; will be compiled on first use by \S+ [\d.]+", str(before)
    )
    assert not options.cache.exists()
    build = ensure(options, source)
    after = native.status(options, source)
    assert after.build == build
    assert str(after) == f"compiled: {build.folder} ({build.compiler})"
    monkeypatch.setenv("PATH", "")
    write(source, {"tiny.h": "#define TINY 2\n"})
    none = native.status(options, source)
    assert str(none) == "unavailable"
    assert none.problem.startswith("No C++ compiler was found")


def test_a_build_says_what_it_is(source, options):
    build = ensure(options, source)
    values = json.loads((build.folder / builds.MANIFEST).read_text())
    assert values["tensorflow"] == compilation.find_tensorflow().version
    assert values["digests"] == {
        compilation.CORE: hashlib.sha256(build.core.read_bytes()).hexdigest()
    }
