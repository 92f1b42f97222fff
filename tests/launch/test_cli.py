"""The entry point: quick, and nothing heavy is imported for it."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from tfdist._src.launch import COMMANDS
from tfdist._src.launch.cli import main
from tfdist._version import __version__

HEAVY = {"tensorflow", "keras", "numpy", "absl", "matplotlib"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["run", "--help"],
        ["doctor", "-h"],
        ["pipeline", "--ranks", "2", "--microbatches", "4"],
        ["pipeline", "--ranks", "2", "--microbatches", "4", "--schedule", "zbv"],
    ],
)
def test_it_imports_nothing_heavy(arguments, environment):
    program = (
        "import sys\n"
        "from tfdist._src.launch.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_run_imports_nothing_heavy(environment, script):
    program = (
        "import sys\n"
        "from tfdist._src.launch.cli import main\n"
        "code = main(sys.argv[1:])\n"
        f"print(code, sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "run", "-n", "2", script("")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name, capsys):
    assert main([]) == 0
    assert name in capsys.readouterr().out
    assert callable(importlib.import_module(COMMANDS[name][0]).main)
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tfdist {__version__}\n"


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    assert main(["fly"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "'fly'" in said
    assert all(name in said for name in COMMANDS)
