"""Compiling: once, again when something changed, and what is left behind."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests.native.conftest import write
from tfdist._src import native
from tfdist._src.native import builder, compilation, store
from tfdist._src.native import compilation as builds
from tfdist._src.native.builder import ensure
from tfdist._src.native.compilation import TensorFlowPackage
from tfdist._src.native.store import writable_by_others
from tfdist._src.options import NativeOptions
from tfdist.errors import NativeUnavailableError

ROOT = Path(native.__file__).parents[3]


def value(build):
    return ctypes.CDLL(str(build.core)).tiny()


def test_it_is_compiled_once(source, options, capfd):
    first = ensure(options, source)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[0] == (
        "tfdist: compiling the native collectives (once per host) ..."
    )
    assert re.search(r"\ntfdist: compiled the native collectives in \d+\.\d s \(g\+\+ ", said.err)
    assert value(first) == 1
    assert first.folder.parent == options.cache / "native"
    assert ensure(options, source) == first
    assert capfd.readouterr().err == ""


def test_what_is_left(source, options):
    build = ensure(options, source)
    assert sorted(path.name for path in build.folder.iterdir()) == [
        "build.json",
        "build.log",
        "libtfdist_core.so",
    ]
    assert sorted(path.name for path in build.folder.parent.iterdir()) == [
        build.folder.name,
        "lock",
    ]
    # Another user may load what one has compiled.
    assert build.folder.stat().st_mode & 0o777 == 0o755
    log = (build.folder / "build.log").read_text()
    assert "-O3" in log
    assert "-march" not in log


def test_the_check_is_cheap(source, options, script, tmp_path):
    calls = tmp_path / "calls"
    counting = script(f'echo "$1" >> {calls}\nexec g++ "$@"')
    options = dataclasses.replace(options, compiler=counting)
    ensure(options, source)
    calls.unlink()
    ensure(options, source)
    assert calls.read_text() == "--version\n"


@pytest.mark.parametrize(
    "change",
    [
        {"tiny.h": "#define TINY 2\n"},
        {"inner/other.cc": '#include "tiny.h"\nint another() { return TINY; }\n'},
        {"inner/new.h": ""},
        {"new.inc": ""},
    ],
    ids=str,
)
def test_sources_change_the_key(source, change):
    package = compilation.find_tensorflow()
    before = compilation.read_recipe(package, source).key
    write(source, change)
    assert compilation.read_recipe(package, source).key != before


@pytest.mark.parametrize("change", [{"notes.txt": "x"}, {"inner/notes.md": "x"}], ids=str)
def test_other_files_do_not(source, change):
    package = compilation.find_tensorflow()
    before = compilation.read_recipe(package, source).key
    write(source, change)
    assert compilation.read_recipe(package, source).key == before


def test_flags_and_versions_change_the_key(source, monkeypatch):
    package = TensorFlowPackage(Path("/a"), "2.21.0")
    keys = {compilation.read_recipe(package, source).key}
    assert compilation.read_recipe(TensorFlowPackage(Path("/b"), "2.21.0"), source).key in keys
    keys.add(compilation.read_recipe(TensorFlowPackage(Path("/a"), "2.21.1"), source).key)
    monkeypatch.setattr(compilation, "_FLAGS", ("-std=c++17", "-O2"))
    keys.add(compilation.read_recipe(package, source).key)
    monkeypatch.setattr(compilation, "_DEFINES", ("-D_GLIBCXX_USE_CXX11_ABI=0",))
    keys.add(compilation.read_recipe(package, source).key)
    assert len(keys) == 4


def test_what_changed_is_compiled_and_the_old_stays(source, options):
    first = ensure(options, source)
    write(source, {"tiny.h": "#define TINY 2\n"})
    second = ensure(options, source)
    assert (value(first), value(second)) == (1, 2)
    assert first.folder.exists()
    write(source, {"tiny.h": "#define TINY 1\n"})
    assert ensure(options, source) == first


def test_another_compiler_compiles_anew(source, options, script):
    first = ensure(options, source)
    other = script('[ "$1" = --version ] && echo "other 1.0" && exit\nexec g++ "$@"')
    second = ensure(dataclasses.replace(options, compiler=other), source)
    assert second.folder != first.folder
    assert second.compiler == "compiler 1.0"


def test_force_compiles_again(source, options):
    first = ensure(options, source)
    second = ensure(options, source, force=True)
    assert second.folder == first.folder
    assert second.stamp != first.stamp
    assert value(second) == 1


def test_clean_removes_old_builds_and_leftovers_alone(source, options):
    old = ensure(options, source)
    stranger = options.cache / "native" / "stranger.log"
    stranger.touch()
    failed = options.cache / "native" / f"{old.folder.name}.log"
    failed.touch()
    abandoned = options.cache / "native" / ".unfinished-x"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    running = options.cache / "native" / ".unfinished-y"
    running.mkdir()
    write(source, {"tiny.h": "#define TINY 2\n"})
    new = ensure(options, source)
    assert builder.clean(options, new) == [old.folder]
    left = {path.name for path in new.folder.parent.iterdir()}
    assert left == {new.folder.name, "lock", "stranger.log", ".unfinished-y"}


WAITING = """
import sys
from pathlib import Path
from tfdist._src.native.builder import ensure
from tfdist._src.native.store import writable_by_others
from tfdist._src.options import NativeOptions
cache, source, compiler = sys.argv[1:]
print(ensure(NativeOptions(cache=Path(cache), compiler=compiler), Path(source)).stamp)
"""


def in_processes(count, options, source):
    command = [sys.executable, "-c", WAITING, str(options.cache), str(source), options.compiler]
    processes = [
        subprocess.Popen(command, cwd=ROOT, text=True, stdout=-1, stderr=-1) for _ in range(count)
    ]
    return [(*process.communicate(), process.returncode) for process in processes]


def test_processes_compile_once(source, options, script, tmp_path):
    slow = script(
        f'[ "$1" = --version ] && echo "slow 1.0" && exit\necho "$*" >> {tmp_path}/calls\n'
        f'sleep 0.3\nexec g++ "$@"'
    )
    answers = in_processes(4, dataclasses.replace(options, compiler=slow), source)
    assert [code for _, _, code in answers] == [0] * 4, answers
    assert len({out for out, _, _ in answers}) == 1
    assert sum("once per host" in err for _, err, _ in answers) == 1
    # Two files and one link.
    assert len((tmp_path / "calls").read_text().splitlines()) == 3


def test_processes_fail_once(source, options, script, tmp_path):
    bad = script(
        f'[ "$1" = --version ] && echo "bad 1.0" && exit\necho "$*" >> {tmp_path}/calls\n'
        f"sleep 0.3\necho 'x.cc:1: error: no' >&2\nexit 1"
    )
    answers = in_processes(4, dataclasses.replace(options, compiler=bad), source)
    assert all(code == 1 and "x.cc:1: error: no" in err for _, err, code in answers)
    assert sum("once per host" in err for _, err, _ in answers) == 1
    assert len((tmp_path / "calls").read_text().splitlines()) <= 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_the_units_are_compiled_together(source, options, script, tmp_path):
    # Each of the two waits until both have begun.
    meeting = script(
        f'[ "$1" = --version ] && echo "meeting 1.0" && exit\necho >> {tmp_path}/begun\n'
        f"for i in $(seq 999); do [ $(wc -l < {tmp_path}/begun) -ge 2 ] && break; sleep 0.1; done\n"
        f'[ $(wc -l < {tmp_path}/begun) -ge 2 ] && exec g++ "$@"'
    )
    assert ensure(dataclasses.replace(options, compiler=meeting), source)


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest", "nonsense", "list"])
def test_a_broken_build_is_made_anew(damage, source, options):
    broken = ensure(options, source)
    manifest = broken.folder / builds.MANIFEST
    if damage == "cut":
        os.truncate(broken.core, 100)
    elif damage == "missing":
        broken.core.unlink()
    elif damage == "manifest":
        manifest.unlink()
    elif damage == "nonsense":
        manifest.write_text("{")
    else:
        manifest.write_text("[]")
    build = ensure(options, source)
    assert build.stamp != broken.stamp
    assert value(build) == 1


def test_a_build_of_a_newer_system_is_passed_over(source, options):
    build = ensure(options, source)
    manifest = build.folder / builds.MANIFEST
    values = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**values, "libc": "glibc 9.99"}))
    assert builds.read_build(build.folder) is not None
    assert builder.find(options, source) is None
    manifest.write_text(json.dumps({**values, "libc": "glibc 2.9"}))
    assert builder.find(options, source) is not None


def test_a_build_without_a_compiler(source, options, monkeypatch):
    build = ensure(options, source)
    monkeypatch.setenv("PATH", "")
    assert ensure(options, source) == build


def test_a_cache_that_cannot_be_written(source, tmp_path, options, capfd):
    (tmp_path / "file").touch()
    blocked = NativeOptions(cache=tmp_path / "file" / "cache")
    build = ensure(blocked, source)
    assert build.folder.parent == store._temporary()
    assert build.folder.parent.stat().st_mode & 0o777 == 0o700
    said = capfd.readouterr().err
    assert f"warning: {tmp_path}/file/cache/native cannot be written (Not a directory)" in said
    assert "set TFDIST_CACHE" in said
    assert ensure(blocked, source) == build
    assert capfd.readouterr().err == ""


def test_without_a_home_directory_it_is_compiled_elsewhere(source, options, capfd):
    assert value(ensure(NativeOptions(), source)) == 1
    assert "there is no home directory" in capfd.readouterr().err


def test_a_temporary_folder_that_others_can_write_is_not_used(source, options):
    shared = store._temporary()
    shared.mkdir()
    shared.chmod(0o777)
    assert ensure(NativeOptions(), source).folder.parent != shared
    assert store.caches(NativeOptions()) == []


def test_nowhere_to_write(source, options, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(NativeUnavailableError, match="Set TFDIST_CACHE to a writable directory"):
        ensure(NativeOptions(cache=tmp_path / "file" / "cache"), source)


def test_the_package_is_used(source, options, tmp_path, monkeypatch, capfd):
    build = ensure(options, source, package=store.PACKAGE)
    assert build.folder.parent == store.PACKAGE
    assert not options.cache.exists()
    capfd.readouterr()
    assert ensure(options, source) == build
    # Any compiler's build will do, also where there is none.
    monkeypatch.setenv("PATH", "")
    assert ensure(options, source) == build
    assert capfd.readouterr().err == ""
    write(source, {"tiny.h": "#define TINY 2\n"})
    assert builder.find(options, source) is None


def test_a_package_that_cannot_be_written(source, options, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NativeUnavailableError, match="run this as the user who"):
        ensure(options, source, package=tmp_path / "file" / "prebuilt")


def test_compilers_are_named():
    version = "Debian clang version 14.0.6"
    assert str(compilation.Compiler(("/usr/bin/clang++",), version)) == "clang++ 14.0.6"
    assert str(compilation.Compiler(("cc",), "no number")) == "cc"


def test_a_cache_that_others_can_write_is_not_used(source, options):
    """Anyone could put a library there, or could have put one there."""
    ensure(options, source)
    options.cache.chmod(0o777)
    lines = []
    build = ensure(options, source, announce=lines.append)
    assert build.folder.parent == store._temporary()
    assert f"everyone can write to {options.cache}" in "".join(lines)
    options.cache.chmod(0o755)
    assert ensure(options, source).folder.parent == options.cache / "native"


@pytest.mark.parametrize(
    ("mode", "uid", "reason"),
    [
        (0o755, 0, None),
        (0o777, 0, "everyone can write to"),
        (0o755, 12345, "belongs to the user 12345"),
    ],
)
def test_who_can_write_to_a_directory(tmp_path, monkeypatch, mode, uid, reason):
    inner = tmp_path / "inner"
    inner.mkdir()
    inner.chmod(mode)
    real = pathlib.Path.stat

    def stat(path, **settings):
        status = real(path, **settings)
        owner = uid if path == inner else status.st_uid
        return types.SimpleNamespace(st_mode=status.st_mode, st_uid=owner, st_gid=status.st_gid)

    monkeypatch.setattr(pathlib.Path, "stat", stat)
    found = writable_by_others(inner)
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize(
    ("name", "members", "safe"),
    [("me", [], True), ("me", ["me"], True), ("me", ["you"], False), ("team", [], False)],
)
def test_which_groups_can_write(tmp_path, monkeypatch, name, members, safe):
    """Directory services need not tell whose primary group it is."""
    inner = tmp_path / "inner"
    inner.mkdir()
    inner.chmod(0o775)
    group = types.SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr("grp.getgrgid", lambda gid: group)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: types.SimpleNamespace(pw_name="me"))
    reason = writable_by_others(inner)
    assert (reason is None) == safe
    assert safe or f"the group {name} can write to {inner}" == reason


def test_links_to_a_directory(tmp_path, monkeypatch):
    """Whoever owns a link, or can write where it is, can put another directory in its place."""
    (tmp_path / "real" / "cache").mkdir(parents=True)
    where = tmp_path / "where"
    where.mkdir()
    (where / "link").symlink_to(tmp_path / "real")
    assert writable_by_others(where / "link" / "cache") is None
    where.chmod(0o777)
    assert writable_by_others(where / "link" / "cache") == f"everyone can write to {where}"
    where.chmod(0o755)
    real = pathlib.Path.lstat

    def lstat(path):
        owner = 12345 if path == where / "link" else real(path).st_uid
        return types.SimpleNamespace(st_mode=real(path).st_mode, st_uid=owner)

    monkeypatch.setattr(pathlib.Path, "lstat", lstat)
    assert "belongs to the user 12345" in writable_by_others(where / "link" / "cache")


def test_what_was_put_there_while_others_could_write_is_not_used(source, options):
    """The directory of a build belongs to somebody else."""
    build = ensure(options, source)
    build.folder.chmod(0o777)
    again = ensure(options, source)
    assert again.folder == build.folder and again.stamp != build.stamp
    assert not again.folder.stat().st_mode & 0o022


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(OSError), store.held(tmp_path / "lock", 1.0, print):
        pass
    assert victim.read_text() == "precious"
