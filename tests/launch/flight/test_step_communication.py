"""What the doctor tells of the values that training steps communicate."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.harness.tiers import exhaustive
from tests.launch.flight.logs import diagnosis, log, name, names, write
from tests.launch.flight.test_jobs import doctor, run
from tfdist._src.global_view.transfer import REMEDIES
from tfdist._src.launch.cli import main
from tfdist._src.launch.flight.log import parse

REDUCED = {
    "kind": "reduce",
    "operation": "MatMul",
    "bytes": 2048,
    "shape": [16, 32],
    "where": "dense/MatMul",
    "reason": "",
}
GATHERED = {
    "kind": "gather",
    "operation": "MatMul",
    "bytes": 4096,
    "shape": [64, 16],
    "where": "train.py:4",
    "reason": "pairs of rows",
}
OF_UNKNOWN_ROWS = {"bytes": None, "shape": [None, 16]}


def step(model="net", program="aa", rows=64, transfers=(GATHERED, REDUCED), **changes):
    return {
        "model": model,
        "program": program,
        "rows": rows,
        "reduced_bytes": 2048,
        "gathered_bytes": 4096 if rows else 0,
        "sent_bytes": 0,
        "unknown": 0 if rows else 1,
        "transfers": [dict(one) for one in transfers],
        "more": 0,
        **changes,
    }


def logs(*steps):
    return [log(r, size=len(steps), step_communication=own) for r, own in enumerate(steps)]


def section(folder, capsys):
    assert main(["doctor", "--flight", str(folder)]) == 0
    lines = iter(capsys.readouterr().out.splitlines())
    found = []
    for line in lines:
        if line == "What a step communicates:":
            found = list(iter(lambda: next(lines), ""))
    return found


def test_what_stages_send_each_other(tmp_path, capsys):
    sent = {**REDUCED, "kind": "send", "operation": "activation", "where": "dense (stage 0 to 1)"}
    own = step(transfers=(sent,), sent_bytes=2048)
    folder = write(tmp_path / "logs", *logs([own], [own]))
    assert section(folder, capsys) == [
        "  A step of 'net' of 64 rows reduces 2.0 KiB, gathers 4.0 KiB and sends 2.0 KiB between "
        "stages:",
        "    send 2.0 KiB [16x32] for activation at dense (stage 0 to 1)",
    ]


def test_the_section_lists_what_steps_communicate(tmp_path, capsys):
    # Rank 1 has not ended its first step, and does not know the number of rows.
    unknown = step(rows=None, transfers=({**GATHERED, **OF_UNKNOWN_ROWS}, REDUCED))
    many = [{**REDUCED, "where": f"layer {i}"} for i in range(12)]
    other = step("other", "bb", rows=None, transfers=many, unknown=2, more=7)
    folder = write(tmp_path / "logs", *logs([unknown], [step(), other], [step()]))
    assert section(folder, capsys) == [
        "  A step of 'net' of 64 rows reduces 2.0 KiB and gathers 4.0 KiB:",
        "    gather 4.0 KiB [64x16] for MatMul at train.py:4 (pairs of rows)",
        "    reduce 2.0 KiB [16x32] for MatMul at dense/MatMul",
        f"    To gather less (pairs of rows): {REMEDIES['pairs of rows']}",
        "  A step of 'other' reduces 2.0 KiB and gathers 0 B, besides 2 values of unknown size:",
        *(f"    reduce 2.0 KiB [16x32] for MatMul at layer {i}" for i in range(10)),
        "    and 9 more",
    ]
    assert main(["doctor", "--flight", str(folder), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["step_communication"]
    remedy = REMEDIES["pairs of rows"]
    assert first == {
        "model": "net",
        "workers": names(0, 1, 2),
        "differs": False,
        "rows": 64,
        "reduced_bytes": 2048,
        "gathered_bytes": 4096,
        "sent_bytes": 0,
        "unknown": 0,
        "transfers": [{**GATHERED, "remedy": remedy}, {**REDUCED, "remedy": ""}],
        "more": 0,
    }
    assert (second["model"], second["workers"], second["more"]) == ("other", names(1), 7)
    # Jobs that do not train, and logs of earlier versions.
    assert section(write(folder, *logs([], [])), capsys) == []
    assert section(write(folder, log(0, size=1)), capsys) == []


def test_a_worker_that_differs(tmp_path, capsys):
    printed = {**GATHERED, "operation": "PrintV2", "where": "train.py:9", "reason": "printed"}
    differing = step(program="cc", transfers=(GATHERED, printed, REDUCED), gathered_bytes=8192)
    job = logs([step()], [differing], [step()])
    usual, other = diagnosis(tmp_path / "logs", *job).step_communication
    assert (usual.workers, usual.differs) == (tuple(names(0, 2)), False)
    assert (other.workers, other.differs) == ((name(1),), True)
    lines = section(tmp_path / "logs", capsys)
    assert lines[4].startswith(
        f"  The step of 'net' on {name(1)} differs from that on workers 0 and 2: it reduces 2.0 "
        "KiB and gathers 8.0 KiB. All workers must run the same program; "
    )
    assert lines[5:] == ["    gather 4.0 KiB [64x16] for PrintV2 at train.py:9 (printed)"]
    # They differ in values that the logs leave out.
    diagnosis(tmp_path / "logs", *logs([step()], [step(program="cc")]))
    assert section(tmp_path / "logs", capsys)[5:] == ["    none of the largest values"]
    for damage in (
        {"rows": "64"},
        {"transfers": [{**GATHERED, "shape": ["64"]}]},
        {"transfers": [{**GATHERED, "bytes": 0.5}]},
        {"transfers": 1},
    ):
        (one,) = logs([{**step(), **damage}])
        with pytest.raises(ValueError, match="it is damaged: "):
            parse(json.dumps(one).encode())


@exhaustive
def test_a_job_that_trains(tmp_path):
    script = Path(__file__).with_name("comparing.py")
    job = run(tmp_path, 2, script, str(int(signal.SIGUSR1)))
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("A training step of 'comparing' gathers 2") == 1, job.stderr
    (found,) = json.loads(doctor(tmp_path, "--json"))["step_communication"]
    assert [one.partition(" (")[0] for one in found["workers"]] == ["worker 0", "worker 1"]
    assert (found["model"], found["rows"], found["differs"]) == ("comparing", 128, False)
    assert found["transfers"][0]["where"].startswith("comparing.py:")
    assert "What a step communicates:" in doctor(tmp_path)
