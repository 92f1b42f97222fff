"""Jobs that are started again after a failure, on one host and on several."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive, some
from tfdist._src.launch.job.ports import Reservation

from .conftest import until

# What a worker of tfdist has, without TensorFlow.
BEGIN = """
from tfdist._src.cluster.session.exit_reason import watch
from tfdist._src.cluster.session.exit_reason import progress_file
generation = int(os.environ["TFDIST_GENERATION"])
watch()
(here / f"worker-{generation}-{rank}.json").write_text(json.dumps(dict(os.environ)))
def step(number):
    progress_file().count(number)
def meet():  # all workers of this generation
    (here / f"here-{generation}-{rank}").touch()
    until(lambda: len(list(here.glob(f"here-{generation}-*"))) == len(config["cluster"]["worker"]))
def save_on_sigterm():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
"""
SOON = {"restart_policy._FIRST_DELAY": 0.05}
NEVER = {"restart_policy._FIRST_DELAY": FAR, "restart_policy._MAX_DELAY": FAR}


@pytest.fixture
def program(script):
    return lambda body: script(BEGIN + body)


def environments(folder, generation):
    paths = sorted(folder.glob(f"worker-{generation}-*.json"))
    return [json.loads(path.read_text()) for path in paths]


def temporary(tmp_path):
    return list((tmp_path / "temporary").iterdir())


def history(job):
    return re.findall(r"^  generation \d+ at [\d: -]+: (.*)$", job.err, re.MULTILINE)


def test_a_killed_worker_is_survived(launch, program, tmp_path):
    path = program("""
meet()
step(10 * generation + 5)
if rank == 1 and generation < 2:
    print("in generation", generation)
    os.kill(os.getpid(), signal.SIGKILL)
if generation < 2:
    stay()
print("the end")
""")
    logs = tmp_path / "logs"
    job = launch(
        *("-n", "3", "--max-restarts", "2", "--grace", "1", "--log-dir", str(logs)),
        path,
        seconds=SOON,
    )
    assert job.wait() == 0, job.err
    assert job.out == "the end\n"
    for generation in range(3):
        workers = environments(tmp_path, generation)
        assert len(workers) == 3
        assert [json.loads(w["TF_CONFIG"])["task"]["index"] for w in workers] == [0, 1, 2]
        assert {w["TFDIST_GENERATION"] for w in workers} == {str(generation)}
        folder = logs / f"restart-{generation}" if generation else logs
        assert {w["TFDIST_FLIGHT_DIR"] for w in workers} == {str(folder)}
        assert (folder / "worker-2.log").exists()
    everyone = [w for generation in range(3) for w in environments(tmp_path, generation)]
    assert len({json.dumps(json.loads(w["TF_CONFIG"])["cluster"]) for w in everyone}) == 1
    assert len({w["TFDIST_SECRET"] for w in everyone}) == 3  # one for each generation
    assert (logs / "worker-1.log").read_text() == "in generation 0\n"
    assert (logs / "restart-1" / "worker-1.log").read_text() == "in generation 1\n"
    killed = "worker 1 was killed by SIGKILL, often because the host ran out of memory, after step"
    assert re.search(rf"Restart 1 of 2 in 0.05 s, at [\d:]+, because {killed} 5\.", job.err)
    assert re.search(rf"Restart 2 of 2 in 0.05 s, at [\d:]+, because {killed} 15\.", job.err)
    assert "All workers have succeeded, after the job has failed 2 times:" in job.err
    assert history(job) == [f"{killed} 5", f"{killed} 15"]
    assert job.processes() == set()


@exhaustive
def test_a_job_is_not_restarted_beyond_the_limit(launch, program, tmp_path):
    path = program("meet(); step(generation + 1); sys.exit(3 if rank == 1 else stay())")
    job = launch("-n", "2", "--max-restarts", "2", "--grace", "1", path, seconds=SOON)
    assert job.wait() == 3
    assert "has failed 3 times and is not started again: --max-restarts 2 is reached." in job.err
    failed = "worker 1 failed with exit code 3, after step"
    assert history(job) == [f"{failed} 1", f"{failed} 2", f"{failed} 3"]
    (folder,) = temporary(tmp_path)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.log")} == {
        "worker-1.log",
        "restart-1/worker-1.log",
        "restart-2/worker-1.log",
    }
    assert job.processes() == set()


@pytest.mark.parametrize(
    ("body", "reason", "said"),
    some(
        [
            ("step(7); raise OSError('no paper')", "at the same step", "(OSError: no paper)"),
            ("raise OSError('no paper')", "before its first step", "(OSError: no paper), at no"),
            ("sys.exit(3)", "before its first step", "exit code 3"),
        ],
        always=[("step(7); raise OSError('no paper')", "at the same step", "(OSError: no paper)")],
    ),
)
def test_the_same_failure_of_the_chief_twice(launch, program, body, reason, said):
    """Its output goes to the terminal, where the launcher does not read it."""
    job = launch("-n", "1", "--max-restarts", "9", program(body), seconds=SOON)
    assert job.wait() in (1, 3)
    line = f"has failed 2 times and is not started again: it has failed in the same way {reason}"
    assert line in job.err
    assert job.err.count("Restart ") == 1
    assert all(said in line for line in history(job))


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    some(
        [
            ("sys.exit(2)", 2, "exit code 2, a usage error, would recur"),
            ("import nothing", 1, "a ModuleNotFoundError would recur"),
            (
                "from tfdist.errors import ClusterError; raise ClusterError('bad')",
                1,
                "a ClusterError would recur",
            ),
            ("raise TypeError('bad')", 1, "a TypeError before the first step would recur"),
        ],
        always=[("import nothing", 1, "a ModuleNotFoundError would recur")],
    ),
)
def test_what_would_come_again(launch, program, tmp_path, body, code, reason):
    job = launch("-n", "2", "--max-restarts", "9", program(body), seconds=SOON)
    assert job.wait() == code
    assert f"tfdist run: The job is not started again: {reason}." in job.err
    assert environments(tmp_path, 1) == []


def test_a_plain_script_is_read_in_its_log(launch, script, tmp_path):
    """It fails before it imports tfdist."""
    job = launch("-n", "2", "--max-restarts", "9", script("if rank: import nothing\nstay()"))
    assert job.wait() == 1
    assert "not started again: a ModuleNotFoundError would recur." in job.err


def test_a_program_that_does_not_compile_is_not_started(launch, script, tmp_path, environment):
    path = script("(here / 'started').touch()\nif True print('x')")
    expected = r"train.py, line \d+: SyntaxError: "
    job = launch("-n", "2", "--max-restarts", "9", path)
    assert job.wait() == 1
    assert re.match(rf"tfdist run: error: \S+{expected}.*\n$", job.err)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise AssertionError('imported')")
    script("def f(:", "package/train.py")
    path = f"{environment['PYTHONPATH']}{os.pathsep}{tmp_path}"
    job = launch("-n", "1", "-m", "package.train", PYTHONPATH=path)
    assert job.wait() == 1
    assert re.match(rf"tfdist run: error: \S+{expected}.*\n$", job.err)
    assert not (tmp_path / "started").exists()
    assert temporary(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "code"),
    some(
        [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
        always=[(signal.SIGTERM, 143)],
    ),
)
def test_a_signal_while_it_waits_to_start_again(launch, program, tmp_path, number, code):
    job = launch("-n", "2", "--max-restarts", "9", program("sys.exit(3)"), seconds=NEVER)
    job.wait_err("Restart 1 of 9 in 3600 s")
    job.process.send_signal(number)
    assert job.wait() == code
    assert f"this command was stopped by {number.name}." in job.err
    assert len(history(job)) == 2
    assert environments(tmp_path, 1) == []
    assert job.processes() == set()


@exhaustive
def test_a_signal_while_a_failure_is_stopped(launch, program, tmp_path):
    path = program("""
signal.signal(signal.SIGTERM, lambda *_: (here / "asked").touch())
meet()
if rank == 1: sys.exit(3)
while True: time.sleep(0.01)
""")
    job = launch("-n", "2", "--max-restarts", "9", "--grace", str(FAR), path, seconds=SOON)
    until((tmp_path / "asked").exists)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 3
    assert "is not started again: a launcher was asked to stop." in job.err
    assert environments(tmp_path, 1) == []


@exhaustive
def test_the_launchers_death_while_it_waits_leaves_nothing(launch, program):
    job = launch("-n", "2", "--max-restarts", "9", program("sys.exit(3)"), seconds=NEVER)
    job.wait_err("Restart 1 of 9")
    job.process.kill()
    job.wait()
    job.wait_gone()


@exhaustive
def test_the_users_secret_stays(launch, program, tmp_path):
    path = program("step(1); sys.exit(0 if generation else 3)")
    job = launch("-n", "1", "--max-restarts", "1", path, seconds=SOON, TFDIST_SECRET="hush")
    assert job.wait() == 0, job.err
    found = [*environments(tmp_path, 0), *environments(tmp_path, 1)]
    assert [worker["TFDIST_SECRET"] for worker in found] == ["hush", "hush"]


@exhaustive
def test_flight_logs_of_each_generation(launch, program, tmp_path):
    path = program("""
folder = Path(os.environ["TFDIST_FLIGHT_DIR"])
folder.mkdir(exist_ok=True)
(folder / f"flight-rank{rank}.json").write_text("{}")
step(generation + 1)
sys.exit(3)
""")
    for how in ({}, {"TFDIST_FLIGHT_DIR": str(tmp_path / "flight")}):
        job = launch("-n", "1", "--max-restarts", "1", path, seconds=SOON, **how)
        assert job.wait() == 3
        found = [Path(name) for name in re.findall(r"tfdist doctor --flight (\S+)", job.err)]
        assert found == [found[0], found[0] / "restart-1"]
        assert all((folder / "flight-rank0.json").exists() for folder in found)


@exhaustive
def test_training_tells_its_step(launch, script):
    path = script("""
        import numpy as np
        import keras
        import tfdist
        strategy = tfdist.MultiWorkerMirroredStrategy()
        class Full(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 2:
                    raise OSError("no space")
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.ones((32, 3))
        model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[Full()])
    """)
    job = launch("-n", "1", "--max-restarts", "9", path, seconds=SOON)
    assert job.wait() == 1
    failed = "worker 0 failed with exit code 1, after step 3 (OSError: no space)"
    assert history(job) == [failed, failed]


# Preemption.

SAVES = """
save_on_sigterm()
meet()
ready()
stay()
"""
SAVED = "The workers have saved their state, and the job ends with code 75; the same command"


def test_sigterm_lets_the_workers_save(launch, program, tmp_path):
    job = launch("-n", "3", "--max-restarts", "9", "--grace", str(FAR), program(SAVES))
    job.wait_ready(3)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 75
    assert job.err.startswith(f"tfdist run: {SAVED}")
    assert job.err.count("\n") == 1
    assert temporary(tmp_path) == []
    assert job.processes() == set()


def test_workers_that_a_scheduler_tells_to_save(launch, program):
    path = program("save_on_sigterm(); meet(); os.kill(os.getpid(), signal.SIGTERM)")
    job = launch("-n", "3", "--max-restarts", "9", path, seconds=SOON)
    assert job.wait() == 75
    assert job.err.startswith(f"tfdist run: {SAVED}")
    assert job.err.count("\n") == 1


@exhaustive
def test_not_all_have_saved(launch, program):
    path = program("if rank: save_on_sigterm()\nmeet(); ready(); stay()")
    job = launch("-n", "3", "--grace", str(FAR), path)
    job.wait_ready(3)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert "this command was stopped by SIGTERM." in job.err


@exhaustive
def test_sigterm_when_one_has_saved_already(launch, program):
    path = program("if rank == 0: ready(); os._exit(75)\nwait_gone(0); ready(); stay()")
    job = launch("-n", "2", "--grace", str(FAR), path)
    job.wait_ready(2)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert "this command was stopped by SIGTERM." in job.err


def test_one_that_saves_and_one_that_fails_are_a_failure(launch, program):
    path = program("""
if rank == 0:
    ready()
    os._exit(75)
wait_gone(0)
sys.exit(9)
""")
    job = launch("-n", "2", path)
    assert job.wait() == 9
    assert "worker 1 failed with exit code 9" in job.err


@exhaustive
def test_one_that_saves_alone_is_a_failure(launch, program):
    job = launch("-n", "2", "--grace", "0.1", program("meet()\nif rank: os._exit(75)\nstay()"))
    assert job.wait() == 1
    line = "worker 1 has saved its state and exited with code 75, the other workers did not"
    assert line in job.err


# Several hosts.


@pytest.fixture
def start(launch):
    """Starts one host of two or three, by default with one worker."""
    with Reservation(1) as reservation:
        at = f"127.0.0.1:{reservation.ports[0]}"

        def host(number, path, *options, hosts=3, workers=1, **settings):
            own = ["-n", str(workers), "--nnodes", str(hosts), "--node-rank", str(number)]
            return launch(*own, "--rendezvous", at, "--grace", "1", *options, path, **settings)

        yield host


@exhaustive
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_hosts_start_again(start, program, tmp_path, failing):
    path = program(f"""
meet()
step(generation + 1)
if rank == {failing} and generation < 2: sys.exit(3)
if generation < 2: stay()
""")
    # The option of host 0 counts.
    options = [("--max-restarts", "2"), ("--max-restarts", "1"), ()]
    jobs = [start(host, path, *options[host], seconds=SOON) for host in range(3)]
    for job in jobs:
        assert job.wait() == 0, job.err
        failed = f"worker {failing} failed with exit code 3, after step"
        assert history(job) == [f"{failed} 1", f"{failed} 2"]
        assert "Restart 1 of 2 in 0.05 s" in job.err and "Restart 2 of 2" in job.err
        assert job.processes() == set()
    everyone = [environments(tmp_path, generation) for generation in range(3)]
    for workers in everyone:
        assert [json.loads(w["TF_CONFIG"])["task"]["index"] for w in workers] == [0, 1, 2]
        assert len({w["TFDIST_SECRET"] for w in workers}) == 1
    assert len({w["TFDIST_SECRET"] for workers in everyone for w in workers}) == 3
    clusters = [json.loads(w["TF_CONFIG"])["cluster"] for workers in everyone for w in workers]
    assert all(cluster == clusters[0] for cluster in clusters)


@exhaustive
def test_a_host_that_is_done_starts_again(start, program, tmp_path):
    path = program("ready()\nif rank == 0 and generation == 0: wait_gone(1); sys.exit(3)")
    jobs = [start(host, path, "--max-restarts", "1", hosts=2, seconds=SOON) for host in (0, 1)]
    assert [job.wait() for job in jobs] == [0, 0]
    assert len(environments(tmp_path, 1)) == 2


@exhaustive
def test_the_same_failure_twice_ends_all_hosts(start, program, tmp_path):
    path = program("meet(); step(4)\nif rank == 2: raise OSError('no paper')\nstay()")
    jobs = [start(host, path, "--max-restarts", "9", seconds=SOON) for host in range(3)]
    for job in jobs:
        assert job.wait() == 1
        assert "it has failed in the same way at the same step before." in job.err
        failed = "worker 2 failed with exit code 1, after step 4 (OSError: no paper)"
        assert history(job) == [failed, failed]
    assert environments(tmp_path, 2) == []


@exhaustive
@pytest.mark.parametrize(
    ("stopped", "how", "code"),
    [
        (0, signal.SIGTERM, 143),
        (1, signal.SIGTERM, 143),
        (1, signal.SIGINT, 130),
        (0, signal.SIGKILL, 1),
        (1, signal.SIGKILL, 1),
    ],
)
def test_the_end_of_one_host_while_all_wait_to_start_again(start, program, stopped, how, code):
    path = program("meet(); sys.exit(3)")
    jobs = [start(host, path, "--max-restarts", "9", seconds=NEVER) for host in range(3)]
    for job in jobs:
        job.wait_err("Restart 1 of 9")
    jobs[stopped].process.send_signal(how)
    for host, job in enumerate(jobs):
        assert job.wait() == (-how if host == stopped and how == signal.SIGKILL else code)
        job.wait_gone()
        if host != stopped:
            said = "was lost" if how == signal.SIGKILL else f"was stopped by {how.name}"
            assert said in job.err


@exhaustive
@pytest.mark.parametrize("dying", [0, 1])
def test_a_launcher_that_dies_ends_the_job(start, program, tmp_path, dying):
    path = program("ready(); stay()")
    jobs = [start(host, path, "--max-restarts", "9", seconds=SOON) for host in range(3)]
    jobs[0].wait_ready(3)
    jobs[dying].process.kill()
    for host, job in enumerate(jobs):
        if host != dying:
            assert job.wait() == 1
            assert f"host {dying} (127.0.0.1) was lost" in job.err
            assert "Restart" not in job.err
        job.wait_gone()


@pytest.mark.parametrize("stopped", some([0, 1], always=[1]))
def test_sigterm_to_one_host_saves_on_all(start, program, stopped):
    jobs = [start(host, program(SAVES), "--grace", str(FAR)) for host in range(3)]
    jobs[0].wait_ready(3)
    jobs[stopped].process.send_signal(signal.SIGTERM)
    for job in jobs:
        assert job.wait() == 75
        assert SAVED in job.err
    assert jobs[stopped].err.count("\n") == 1


@exhaustive
def test_not_all_hosts_have_saved(start, program):
    path = program("if rank: save_on_sigterm()\nmeet(); ready(); stay()")
    jobs = [start(host, path, "--max-restarts", "9") for host in range(3)]
    jobs[0].wait_ready(3)
    jobs[1].process.send_signal(signal.SIGTERM)
    assert [job.wait() for job in jobs] == [143] * 3


def test_workers_of_all_hosts_that_a_scheduler_tells_to_save(start, program):
    """At once, without waiting for others that might follow."""
    path = program("save_on_sigterm(); meet(); os.kill(os.getpid(), signal.SIGTERM)")
    jobs = [start(host, path, "--max-restarts", "9", "--grace", str(FAR)) for host in range(3)]
    assert [job.wait() for job in jobs] == [75] * 3
