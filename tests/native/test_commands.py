"""`tfdist build`, and what `tfdist run` and `tfdist doctor` make of the native collectives."""

from __future__ import annotations

import re
from pathlib import Path

from tests.native.conftest import write

COMPILING = "tfdist: compiling the native collectives (once per host) ..."


def paths(output):
    return [Path(path) for path in re.findall(r"^  (/\S+\.so)$", output, flags=re.MULTILINE)]


def test_build_compiles_once_and_again_after_a_change(installation, python, tmp_path):
    first = python(installation, "-m", "tfdist", "build")
    assert first.returncode == 0, first.stderr
    assert re.match(r"compiled in \d+\.\d s by \S+ [\d.]+ for TensorFlow 2\.\d+", first.stdout)
    assert first.stderr.startswith(COMPILING)
    (library,) = paths(first.stdout)
    assert library.parents[1] == tmp_path / "home" / ".cache" / "tfdist" / "native"
    second = python(installation, "-m", "tfdist", "build")
    assert second.stdout.startswith("already compiled by")
    assert paths(second.stdout) == [library]
    assert second.stderr == ""
    third = python(installation, "-m", "tfdist", "build", "--force")
    assert COMPILING in third.stderr
    write(installation / "tfdist" / "csrc", {"tiny.h": "#define TINY 2\n"})
    fourth = python(installation, "-m", "tfdist", "build", "--clean")
    assert fourth.stdout.splitlines()[-1] == f"removed {library.parent}"
    assert not library.exists()


def test_build_imports_nothing_heavy(installation, python):
    program = (
        "import sys; from tfdist._src.launch.cli import main; print(main(['build']), "
        "sorted({'tensorflow', 'keras', 'numpy', 'absl'} & set(sys.modules)))"
    )
    done = python(installation, "-c", program)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_build_that_fails(installation, python):
    write(installation / "tfdist" / "csrc", {"core.cc": "nonsense\n"})
    done = python(installation, "-m", "tfdist", "build")
    assert done.returncode == 1
    assert "tfdist build: error: The native collectives could not be compiled" in done.stderr
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_build_with_a_wrong_setting(installation, python):
    done = python(installation, "-m", "tfdist", "build", TFDIST_NATIVE="no")
    assert done.returncode == 1
    assert done.stderr.startswith("tfdist build: error: TFDIST_NATIVE must be 0 or 1")


def run(python, installation, **settings):
    (installation / "train.py").write_text("print('trained')\n")
    return python(installation, "-m", "tfdist", "run", "-n", "1", "train.py", **settings)


def test_run_compiles_first(installation, python):
    first = run(python, installation)
    assert (first.returncode, first.stdout) == (0, "trained\n")
    assert first.stderr.startswith(COMPILING)
    second = run(python, installation)
    assert (second.returncode, second.stdout, second.stderr) == (0, "trained\n", "")


def test_run_warns_once_and_goes_on(installation, python):
    write(installation / "tfdist" / "csrc", {"core.cc": "nonsense\n"})
    done = run(python, installation)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("tfdist run: warning: The native collectives could not be") == 1


def test_run_does_without_where_it_is_switched_off(installation, python, tmp_path):
    done = run(python, installation, TFDIST_NATIVE="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "home").exists()


def test_run_with_a_wrong_setting(installation, python):
    done = run(python, installation, TFDIST_NATIVE="no")
    assert done.returncode == 1
    assert done.stderr.startswith("tfdist run: error: TFDIST_NATIVE must be 0 or 1")


def test_doctor_says_whether_the_core_is_compiled(installation, python):
    program = (
        "import os; from tfdist._src.launch.commands.doctor import software; "
        "from tfdist._src.launch.commands.doctor.section import Context; "
        "section = software.check_native(Context(os.environ)); "
        "print(section.rows, section.problems)"
    )

    def look(**settings):
        done = python(installation, "-c", program, **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "not compiled yet; will be compiled on first use by g++" in look()
    assert "('native', 'unavailable')" in look(PATH="")
    assert "No C++ compiler was found" in look(PATH="")
    assert "switched off by TFDIST_NATIVE=0')] []" in look(TFDIST_NATIVE="0")
    assert "TFDIST_NATIVE must be 0 or 1" in look(TFDIST_NATIVE="no")
    python(installation, "-m", "tfdist", "build")
    assert re.search(r"'compiled: /\S+/native/\S+ \(g\+\+ [\d.]+\)'\)\] \[\]", look())
