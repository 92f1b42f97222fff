"""Elastic jobs on one host: a worker that fails is replaced while the others go on."""

from __future__ import annotations

import json
import os
import re
import resource
import signal

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive, some

from .conftest import until

# What a worker of tfdist has, without TensorFlow; `life` counts the processes of a rank from 0.
BEGIN = """
from tfdist._src.cluster.session.exit_reason import watch
from tfdist._src.cluster.session.exit_reason import progress_file
watch()
life = len(list(here.glob(f"life-{rank}-*.json")))
(here / "new").write_text(json.dumps({**os.environ, "pid": os.getpid()}))
(here / "new").rename(here / f"life-{rank}-{life}.json")
everyone = range(len(config["cluster"]["worker"]))
print(f"rank {rank} life {life}")
def step(number):
    progress_file().count(number)
def lives(rank, life):
    return (here / f"life-{rank}-{life}.json").exists()
def meet():
    until(lambda: all(lives(other, 0) for other in everyone))
def tell(name):
    (here / name).touch()
def hear(*names):
    until(lambda: all((here / name).exists() for name in names))
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def save_on_sigterm():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
"""
# Spares that have nothing to import.
LIGHT = {"job.spares._PRELOAD": []}
SOON = {"restart_policy._FIRST_DELAY": 0.05}
NEVER = {"restart_policy._FIRST_DELAY": FAR, "restart_policy._MAX_DELAY": FAR}
KILLED = "worker 1 was killed by SIGKILL, often because the host ran out of memory"


@pytest.fixture
def program(script):
    # Ranks that start at once must not write the same file.
    return lambda body: script(BEGIN.replace('"new"', 'f"new-{rank}"') + body)


@pytest.fixture
def elastic(launch):
    def start(*arguments, seconds=None, spares=0, **settings):
        options = ("--elastic", "--spares", str(spares))
        return launch(*options, *arguments, seconds={**LIGHT, **(seconds or {})}, **settings)

    return start


def life(folder, rank, number):
    return json.loads((folder / f"life-{rank}-{number}.json").read_text())


def lives(folder):
    return sorted(path.stem.removeprefix("life-") for path in folder.glob("life-*.json"))


@pytest.mark.parametrize("spares", some([0, 1], always=[1]))
def test_a_killed_worker_is_replaced_while_the_others_go_on(elastic, program, tmp_path, spares):
    path = program("""
meet()
if rank == 1 and life == 0:
    step(5)
    hear("spare")
    die()
if rank == 1:
    step(6)
    tell("joined")
hear("joined")
print("the end")
""")
    logs = tmp_path / "logs"
    job = elastic("-n", "3", "--log-dir", str(logs), path, spares=spares)
    until(lambda: len(job.processes()) == 4 + spares)  # with the watchdog
    (tmp_path / "spare").touch()
    assert job.wait() == 0, job.err
    assert job.out == "rank 0 life 0\nthe end\n"
    assert lives(tmp_path) == ["0-0", "1-0", "1-1", "2-0"]
    one, other = life(tmp_path, 1, 0), life(tmp_path, 1, 1)
    assert (one["TFDIST_ELASTIC"], one["TFDIST_GENERATION"]) == ("1", "0")
    assert one.pop("pid") != other.pop("pid")
    # The memory may have the same path, but is another one.
    assert one | {"TFDIST_PROGRESS_FILE": ""} == other | {"TFDIST_PROGRESS_FILE": ""}
    log = (logs / "worker-1.log").read_text()
    mark = r"--- tfdist run: replacement 1 of 3 of worker 1 starts at [\d: -]+ ---"
    assert re.fullmatch(rf"rank 1 life 0\n{mark}\nrank 1 life 1\nthe end\n", log)
    line = f"{KILLED}, after step 5; replaced at once (1 of 3). The others continue. Its log: "
    assert f"tfdist run: {line}{logs}/worker-1.log\n" in job.err
    assert "tfdist run: The training is complete. Failures:\n  " in job.err
    assert job.err.count("\n") == 3
    assert job.processes() == set()


@exhaustive
@pytest.mark.parametrize("output", ["chief", "all"])
def test_a_launcher_without_descriptors_goes_on(elastic, program, tmp_path, output):
    job = elastic("-n", "2", "--output", output, program("meet()\nhear('on')"))
    until(lambda: lives(tmp_path) == ["0-0", "1-0"])
    limits = resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    os.kill(life(tmp_path, 1, 0)["pid"], signal.SIGKILL)
    job.wait_err("not replaced: ")
    assert "Too many open files" in job.err
    resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, limits)
    (tmp_path / "on").touch()
    assert job.wait() == 0, job.err
    assert lives(tmp_path) == ["0-0", "1-0"]


@exhaustive
def test_others_go_on_without_a_worker_that_cannot_be_had(elastic, program, tmp_path):
    """Nor is one replaced that has left on request."""
    path = program("""
meet()
if rank == 1:
    step(life + 1)
    raise OSError("no paper")
if rank == 2:
    hear("life-1-1.json")
    sys.exit(75)
if rank == 0:
    hear("alone")
""")
    job = elastic("-n", "3", "--max-restarts", "1", path)
    job.wait_err("--max-restarts 1 is reached. The others continue.")
    job.wait_err(
        "worker 2 has saved its state and exited with code 75. The others continue without"
    )
    (tmp_path / "alone").touch()
    assert job.wait() == 0, job.err
    assert "complete. It was completed without worker 1. Failures:" in job.err
    assert lives(tmp_path) == ["0-0", "1-0", "1-1", "2-0"]
    assert job.err.count("(OSError: no paper)") == 4
    assert job.processes() == set()


@exhaustive
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("step(7); raise OSError('no paper')", "it has failed in the same way at the same step"),
        ("sys.exit(2)", "exit code 2, a usage error, would recur"),
        ("import nothing", "a ModuleNotFoundError would recur"),
    ],
)
def test_what_cannot_help_is_not_tried(elastic, program, body, reason):
    job = elastic("-n", "2", program(f"if rank: {body}\nhear('on')"), seconds=SOON)
    job.wait_err(f"; not replaced: {reason}")
    (job.folder / "on").touch()
    assert job.wait() == 0
    assert "It was completed without worker 1." in job.err


@exhaustive
def test_a_job_without_workers_fails_with_the_first_failure(elastic, program, tmp_path):
    path = program("""
meet()
if rank == 1: tell("one"); sys.exit(4)
hear("go")
sys.exit(3)
""")
    job = elastic("-n", "2", "--max-restarts", "0", path)
    job.wait_err("worker 1 failed with exit code 4, at no known step; not replaced: --max-restarts")
    (tmp_path / "go").touch()
    assert job.wait() == 4
    assert "No other worker is running here." in job.err
    assert "tfdist run: The job has failed. Failures:" in job.err
    assert re.search(
        r"worker 1 failed with exit code 4\. Last lines of its output:\n  \| rank 1 ", job.err
    )
    assert job.processes() == set()


@exhaustive
def test_a_replacement_that_never_joined_is_stopped_in_the_end(elastic, program, tmp_path):
    path = program("""
if rank == 1 and life == 0:
    meet()
    die()
if rank == 1:
    signal.signal(signal.SIGTERM, lambda *_: tell("asked"))
    tell("waits")
    while True: time.sleep(0.01)
hear("waits")
""")
    job = elastic("-n", "2", "--grace", "0.1", path, spares=1)
    assert job.wait() == 0, job.err
    assert (tmp_path / "asked").exists()
    assert lives(tmp_path) == ["0-0", "1-0", "1-1"]
    assert job.processes() == set()


@exhaustive
def test_a_replacement_is_of_no_use_when_the_others_have_saved_and_left(elastic, program, tmp_path):
    path = program("""
if rank == 1 and life == 0:
    meet()
    die()
if rank == 1:
    tell("waits")
    while True: time.sleep(0.01)
hear("waits")
sys.exit(75)
""")
    job = elastic("-n", "2", "--grace", "0.1", path)
    assert job.wait() == 75, job.err
    assert lives(tmp_path) == ["0-0", "1-0", "1-1"]
    assert job.processes() == set()


@exhaustive
@pytest.mark.parametrize("ends", [True, False])
def test_a_worker_that_is_stopped_is_killed_once_the_others_have_given_it_up(
    elastic, program, tmp_path, ends
):
    path = program(f"""
meet()
if rank == 1 and life == 0:
    step(5)
    tell("stopped")
    os.kill(os.getpid(), signal.SIGSTOP)
hear("stopped")
if rank == 0 and not {ends}:
    hear("life-1-1.json")
""")
    job = elastic("-n", "2", path, TFDIST_HEARTBEAT_TIMEOUT="1")
    assert job.wait() == 0, job.err
    assert "worker 1 has been stopped (SIGSTOP) for 6 s, so the others have given it up" in job.err
    assert lives(tmp_path) == (["0-0", "1-0"] if ends else ["0-0", "1-0", "1-1"])
    assert job.processes() == set()


@exhaustive
def test_one_that_has_joined_is_not_stopped(elastic, program, tmp_path):
    path = program("""
if rank == 1 and life == 0:
    meet()
    die()
if rank == 1:
    step(9)
    tell("joined")
    hear("late")
else:
    hear("joined")
""")
    job = elastic("-n", "2", path)
    until((tmp_path / "joined").exists)
    pid = life(tmp_path, 0, 0)["pid"]
    until(lambda: not os.path.exists(f"/proc/{pid}"))
    (tmp_path / "late").touch()
    assert job.wait() == 0, job.err
    assert "The training is complete. Failures:" in job.err


@exhaustive
def test_a_failure_after_the_training_is_complete(elastic, program, tmp_path):
    path = program("""
meet()
if rank == 1:
    hear("late")
    sys.exit(5)
""")
    job = elastic("-n", "2", path)
    pid = until_life(tmp_path, 0, 0)["pid"]
    until(lambda: not os.path.exists(f"/proc/{pid}"))
    (tmp_path / "late").touch()
    assert job.wait() == 5
    assert "not replaced: the training is complete." in job.err
    assert "The job has failed in the end." in job.err


def until_life(folder, rank, number):
    until((folder / f"life-{rank}-{number}.json").exists)
    return life(folder, rank, number)


@exhaustive
@pytest.mark.parametrize("spares", [0, 1])
def test_the_chief_is_replaced_where_its_output_is(elastic, program, tmp_path, spares):
    path = program("""
meet()
if rank == 0 and life == 0:
    hear("spare")
    die()
if rank == 0:
    print(f"read {sys.stdin.read()!r}")
    step(1)
    tell("joined")
hear("joined")
""")
    job = elastic("-n", "2", path, spares=spares)
    until(lambda: len(job.processes()) == 3 + spares)
    (tmp_path / "spare").touch()
    assert job.wait() == 0, job.err
    assert job.out == "rank 0 life 0\nrank 0 life 1\nread ''\n"


@exhaustive
@pytest.mark.parametrize("spares", [0, 1])
def test_all_output_includes_that_of_replacements(elastic, program, tmp_path, spares):
    path = program("""
meet()
if rank == 1 and life == 0:
    hear("spare")
    die()
if rank == 1:
    step(1)
    tell("joined")
hear("joined")
""")
    job = elastic("-n", "2", "--output", "all", path, spares=spares)
    until(lambda: len(job.processes()) == 3 + spares)
    (tmp_path / "spare").touch()
    assert job.wait() == 0, job.err
    assert sorted(job.out.splitlines()) == [
        "[1] rank 1 life 0",
        "[1] rank 1 life 1",
        "rank 0 life 0",
    ]


@exhaustive
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)],
)
def test_a_signal_stops_the_workers_and_replaces_none(elastic, program, tmp_path, number, code):
    path = program("""
save_on_sigterm()
meet()
if rank == 1: step(9 - life); die()
if rank == 2 and life == 0: hear("one"); sys.exit(3)
if rank == 2: signal.signal(signal.SIGTERM, signal.SIG_DFL)  # It has not joined.
ready()
stay()
""")
    job = elastic("-n", "3", "--max-restarts", "9", path, spares=1, seconds=NEVER)
    job.wait_err("replaced in 3600 s (2 of 9)")
    (tmp_path / "one").touch()
    until(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    job.process.send_signal(number)
    assert job.wait() == code, job.err
    saved = "The remaining workers have saved their state, and the job ends with code 75"
    assert (saved in job.err) == (code == 75)
    assert (f"this command was stopped by {number.name}." in job.err) == (code != 75)
    assert "2-1" in lives(tmp_path) and "2-2" not in lives(tmp_path)
    assert job.processes() == set()


@exhaustive
def test_a_job_whose_workers_all_leave(elastic, program):
    job = elastic("-n", "2", program("meet(); sys.exit(75)"))
    assert job.wait() == 75
    assert "the same command continues it" in job.err


@exhaustive
def test_the_launchers_death_leaves_nothing(elastic, program):
    job = elastic("-n", "2", program("ready(); stay()"), spares=2)
    until(lambda: len(job.processes()) == 5)
    job.wait_ready(2)
    job.process.kill()
    job.wait()
    job.wait_gone()


@exhaustive
def test_a_second_ctrl_c_kills(elastic, program):
    path = program("signal.signal(signal.SIGINT, signal.SIG_IGN); ready(); stay()")
    job = elastic("-n", "2", "--grace", str(FAR), path)
    job.wait_ready(2)
    job.process.send_signal(signal.SIGINT)
    until(lambda: not pending(job.process.pid))
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert job.processes() == set()


def pending(pid):
    """Whether a signal has arrived that the process has not handled."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        fields = dict(line.split(":\t") for line in file.read().splitlines())
    return int(fields["SigPnd"], 16) or int(fields["ShdPnd"], 16)


@exhaustive
def test_it_is_shown_what_is_started(launch, program):
    job = launch("--elastic", "-n", "2", "--dry-run", program(""))
    assert job.wait() == 0
    assert job.out.count("TFDIST_ELASTIC=1") == 2
