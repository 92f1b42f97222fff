"""Warm spares: a program runs in one as the interpreter runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.launch.job import spares
from tfdist._src.launch.job.spares import Spare, Spares

from .conftest import ROOT, until

SHOW = """
import os, sys, __main__
print(sys.argv, sys.path[0], __name__, __file__, os.getcwd(), os.environ.get("TASK"))
print(__main__.__dict__ is globals(), __spec__ and __spec__.name, __package__, __doc__)
made_when_needed = {"__annotations__"}
print(sorted({name for name in globals() if name.startswith("__")} - made_when_needed))
print("on stderr", file=sys.stderr)
print(repr(sys.stdin.read()), sys.stdout.isatty(), sys.flags.safe_path)
"""
FILES = {
    "show.py": SHOW,
    "module.py": SHOW,
    "package/__init__.py": "",
    "package/__main__.py": SHOW,
    "package/train.py": SHOW + "from . import __main__",
    "folder/__main__.py": SHOW + "import beside",
    "folder/beside.py": "print('beside')",
    "inner/beside.py": "print('beside')",
    "inner/imports.py": "import beside",
    "raises.py": """
        def inner(): {}["no"]
        try:
            inner()
        except KeyError as error:
            raise OSError("no paper") from error
    """,
    "hooked.py": """
        import sys
        before = sys.excepthook
        def hook(*what): print("hooked", file=sys.stderr); before(*what)
        sys.excepthook = hook
        1 / 0
    """,
    "exits.py": "import sys; sys.exit(3)",
    "says.py": "import sys; sys.exit('a message')",
    "interrupted.py": "raise KeyboardInterrupt",
    "killed.py": "import os; os.kill(os.getpid(), 9)",
    "wrong.py": "x = (",
    "last.py": """
        import atexit, threading, time, pickle
        class Mine: pass
        def later(): time.sleep(0.05); print(type(pickle.loads(pickle.dumps(Mine()))))
        atexit.register(lambda: print("at exit", type(pickle.loads(pickle.dumps(Mine())))))
        threading.Thread(target=later).start()
    """,
    "spawns.py": """
        import multiprocessing
        class Mine: pass
        def work(x): print("child", __name__, x * 2, flush=True); return Mine()
        if __name__ == "__main__":
            for method in ("spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(type(pool.apply(work, (21,))))
    """,
}
PROGRAMS = [
    "show.py a --b",
    "./show.py",
    "inner/../show.py",
    "-m module a b",
    "-mmodule",
    "-m package x",
    "-m package.train",
    "{here}/folder x",
    "inner/imports.py",
    "link.py",
    "raises.py",
    "hooked.py",
    "exits.py",
    "says.py",
    "interrupted.py",
    "killed.py",
    "wrong.py",
    "last.py",
    "spawns.py",
    "-m spawns",
]


class NoWatchdog:
    def add_this_process(self):
        pass

    def remove(self, group):
        pass


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (tmp_path / "inner" / "link.py").symlink_to(tmp_path / "show.py")
    (tmp_path / "link.py").symlink_to(tmp_path / "inner" / "imports.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spares, "_PRELOAD", ())
    return tmp_path


def environment(**more):
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": ROOT, **more}


def ended(process):
    until(lambda: process.exit_code() is not None)
    return process.exit_code()


def as_usual(program, folder):
    result = subprocess.run(
        [sys.executable, "-u", *program.split()],
        env=environment(TASK="7"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
    )
    return result.returncode, result.stdout, result.stderr


def in_a_spare(program, folder, *, wait=True):
    spare = Spare(program.split(), environment(REMOVED="1"), NoWatchdog())
    if wait:
        until(lambda: spare.ready)
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = spare.become(environment(TASK="7"), (subprocess.DEVNULL, out, err))
    assert process is spare.process
    return ended(process), (folder / "out").read_text(), (folder / "err").read_text()


@exhaustive
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_does_what_it_does_as_usual(folder, program):
    program = program.format(here=folder)
    assert in_a_spare(program, folder) == as_usual(program, folder)


@exhaustive
def test_a_task_that_comes_before_it_is_ready(folder, monkeypatch):
    # An import that takes as long as the task does.
    (folder / "slow.py").write_text("import select, sys\nselect.select([int(sys.argv[1])], [], [])")
    monkeypatch.setattr(spares, "_PRELOAD", ("slow", "json.tool"))
    assert in_a_spare("show.py", folder, wait=False) == as_usual("show.py", folder)


@exhaustive
def test_without_a_task_it_ends_with_an_error(folder):
    spare = Spare(["show.py"], environment(), NoWatchdog())
    until(lambda: spare.ready)
    spare.close()
    assert ended(spare.process) == 1


@exhaustive
def test_a_spare_that_cannot_import_is_the_last_one(folder, monkeypatch):
    monkeypatch.setattr(spares, "_PRELOAD", ("nothing_of_that_name",))
    pool = Spares(2, ["show.py"], environment(), NoWatchdog())
    assert pool.tend() == ""
    (said,) = filter(None, iter_until(pool.tend))
    assert "a warm spare ended with exit code 1: ModuleNotFoundError: No module named" in said
    assert pool.tend() == "" and pool.take() is None
    pool.close()


@exhaustive
def test_one_that_is_killed_is_started_again_a_few_times(folder):
    pool = Spares(1, ["show.py"], environment(), NoWatchdog())
    seen = set()
    while not (said := pool.tend()):
        pid = pool._spares[0].process.pid
        if pid not in seen:
            seen.add(pid)
            os.kill(pid, 9)
    assert said == "a warm spare ended with signal 9; replacements start without one."
    assert len(seen) == 3
    assert pool.take() is None
    pool.close()


@exhaustive
def test_one_that_is_stopped_is_not_taken(folder):
    pool = Spares(2, ["show.py"], environment(), NoWatchdog())
    pool.tend()
    stopped, other = (spare.process for spare in pool._spares)
    until(lambda: pool._spares[0].ready)
    os.kill(stopped.pid, signal.SIGSTOP)
    until(lambda: stopped.stopped)
    taken = pool.take()
    assert taken.process is other
    assert ended(stopped) == -signal.SIGKILL
    taken.process.end()
    taken.close()
    pool.close()


def iter_until(call):
    while True:
        found = call()
        yield found
        if found:
            return


def is_spare(pid):
    return b"spare_program" in Path(f"/proc/{pid}/cmdline").read_bytes()


def until_some(call):
    while not (found := call()):
        time.sleep(0.02)
    return found


PROBE = """
import sys
loaded = {"tensorflow", "keras", "tfdist._src.strategy.multi_worker"} <= set(sys.modules)
from tensorflow.python.eager import context
from tfdist._src.cluster.session import exit_reason
print("loaded", loaded, "devices", context.context()._initialized, "opened", exit_reason._opened)
import tensorflow as tf, tfdist
tfdist.MultiWorkerMirroredStrategy
print(exit_reason.progress_file() is not None, float(tf.reduce_sum(tf.ones([3]))))
print(len(tf.config.list_logical_devices()))
"""


@exhaustive
def test_it_has_imported_tensorflow_and_touched_no_device(launch, script):
    path = script(
        """
lives = here / f"life-{rank}"
if rank == 0:
    until((here / "done").exists)
elif not lives.exists():
    lives.touch()
    until((here / "spare-is-ready").exists)
    os.kill(os.getpid(), signal.SIGKILL)
else:
    PROBE
    (here / "done").touch()
""".replace("    PROBE\n", textwrap.indent(PROBE, "    "))
    )
    job = launch("-n", "2", "--elastic", "--output", "all", path)
    (pid,) = until_some(lambda: [pid for pid in job.processes() if is_spare(pid)])
    # It waits for its task once it sleeps in the system call.
    until(lambda: "unix_stream" in Path(f"/proc/{pid}/wchan").read_text())
    (job.folder / "spare-is-ready").touch()
    assert job.wait() == 0, job.err
    found = [line for line in job.out.splitlines() if "cuda" not in line]
    assert found == ["[1] loaded True devices False opened False", "[1] True 3.0", "[1] 1"]
    assert job.processes() == set()
