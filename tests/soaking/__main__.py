"""Trains for minutes while workers are killed, stopped, sent away and added, and audits it all.

    python -m tests.soaking --minutes=60 --seed=1

Training after training, each with a plan of faults by its seed: the first has that of --seed, the
next one more. Of each training it is checked that all workers have the same weights after every
step, that every row of an epoch is trained exactly once, that the weights in the end are those of
one undisturbed process to 1e-5, and that no process, segment, file or port is left. It ends with
the first training that fails, shows its seed, and keeps its folder; that seed alone, with
--minutes=0, is the same training again.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from absl import app, flags

from tests.soaking import audit
from tests.soaking.members import Members
from tests.soaking.plan import Event, make_plan
from tests.soaking.records import read
from tests.soaking.worker import Training

PATIENCE = 30.0  # seconds until a segment that is still there counts as left

FLAGS = flags.FLAGS
flags.DEFINE_float("minutes", 3.0, "how long new trainings are begun; 0 for one", lower_bound=0)
flags.DEFINE_integer("seed", 0, "of the first training's plan", lower_bound=0)
flags.DEFINE_integer("start", 2, "workers at first", lower_bound=1)
flags.DEFINE_integer("least", 1, "workers that the group needs", lower_bound=1)
flags.DEFINE_integer("most", 4, "workers that it may have", lower_bound=1)
flags.DEFINE_integer("epochs", 150, "of each training", lower_bound=1)
flags.DEFINE_integer("rows", 94, "of an epoch", lower_bound=1)
flags.DEFINE_integer("batch", 24, "rows of a step, of all workers together", lower_bound=1)
flags.DEFINE_float("silence", 5.0, "seconds after which a silent worker is lost", lower_bound=1)
flags.DEFINE_float("timeout", 300.0, "seconds to wait for anything", lower_bound=1)
flags.DEFINE_bool("faults", True, "no: the same trainings and checks without any fault")
flags.register_multi_flags_validator(
    ["start", "least", "most"],
    lambda values: values["least"] <= values["start"] <= values["most"],
    "--least is at most --start, and that at most --most",
)


def main(_: list[str]) -> int:
    """Trains until the time is up.

    Returns:
        1 where something was wrong.
    """
    end = time.monotonic() + 60 * FLAGS.minutes
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = reference(Path(folder))
    seed = FLAGS.seed
    while True:
        events = plan(seed) if FLAGS.faults else []
        folder = Path(tempfile.mkdtemp(prefix="tfdist-soak-"))
        wrong = soak(folder, events, undisturbed)
        kinds = ", ".join(event.kind for event in events) or "no faults"
        print(f"seed {seed}: {kinds}: {'; '.join(wrong) or 'all is right'}", flush=True)
        if wrong:
            print(f"records and output: {folder}")
            return 1
        shutil.rmtree(folder)
        seed += 1
        if time.monotonic() >= end:
            return 0


def plan(seed: int) -> list[Event]:
    """The faults of a training."""
    steps = make_training(Path(), True).steps
    return make_plan(seed, steps=steps, start=FLAGS.start, least=FLAGS.least, most=FLAGS.most)


def make_training(folder: Path, elastic: bool) -> Training:
    """What is trained in a folder."""
    return Training(
        records=str(folder / "records"),
        slow=str(folder / "slow"),
        result=str(folder / "result.npz"),
        epochs=FLAGS.epochs,
        rows=FLAGS.rows,
        batch=FLAGS.batch,
        least=FLAGS.least if elastic else 0,
        most=FLAGS.most,
    )


def reference(folder: Path) -> list[np.ndarray]:
    """The weights of one undisturbed process."""
    members = make_members(folder, elastic=False)
    try:
        members.start(1)
        codes = members.finish()
    finally:
        members.stop()
    if set(codes.values()) != {0}:
        sys.exit(f"the training without faults failed: {members.log.read_text()[-2000:]}")
    return load(members.training)


def make_members(folder: Path, elastic: bool) -> Members:
    """Workers in a folder, none of which is started yet."""
    training = make_training(folder, elastic)
    temporary = folder / "temporary"
    for part in (Path(training.records), temporary):
        part.mkdir()
    environment = {
        "TFDIST_HEARTBEAT_TIMEOUT": str(FLAGS.silence),
        "TFDIST_SECURITY": "none",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TMPDIR": str(temporary),
    }
    return Members(training, folder / "log", environment, FLAGS.timeout)


def soak(folder: Path, events: list[Event], undisturbed: list[np.ndarray]) -> list[str]:
    """One training with its faults; returns what is wrong."""
    before = segments()
    members = make_members(folder, elastic=FLAGS.faults)
    wrong = []
    try:
        members.start(FLAGS.start)
        members.happen(events)
        codes = members.finish()
        wrong += audit.check_exits(codes, members.allowed)
    except TimeoutError as error:
        wrong.append(str(error))
    finally:
        members.stop()
    records = read(members.training.records)
    wrong += audit.check_steps(records, members.training.steps)
    wrong += audit.check_weights(records)
    wrong += audit.check_rows(records, set(range(1, FLAGS.rows + 1)), FLAGS.epochs)
    if Path(members.training.result).exists():
        wrong += audit.check_result(load(members.training), undisturbed)
    ports = {member.address.rpartition(":")[2] for member in members.all}
    return wrong + audit.check_left({}, find_left(before, ports, folder / "temporary"))


def listening() -> set[str]:
    """The ports of this machine at which someone listens."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports.add(str(int(fields[1].rpartition(":")[2], 16)))
    return ports


def segments() -> set[str]:
    """The names of memory that processes of this machine share."""
    return {path.name for path in Path("/dev/shm").glob("tfdist-*")}


def find_left(before: set[str], ports: set[str], temporary: Path) -> dict[str, set[str]]:
    """What a training has left, but for its processes, which are waited for.

    Args:
        before: the segments that were there before.
        ports: of its workers.
        temporary: the folder for its temporary files.
    """
    new = segments() - before
    end = time.monotonic() + PATIENCE
    while new and time.monotonic() < end:
        time.sleep(0.1)
        new &= segments()  # Those of other jobs are gone soon.
    files = {path.name for path in temporary.iterdir()}
    return {"segments": new, "files": files, "ports": ports & listening()}


def load(training: Training) -> list[np.ndarray]:
    """The weights in the end."""
    with np.load(training.result) as stored:
        return [stored[name] for name in stored.files]


if __name__ == "__main__":
    app.run(main)
