"""The command line: what is the launcher's and what is the script's."""

from __future__ import annotations

import re

import pytest

from tfdist._src.launch.job.run_options import RunOptions, parse


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    (tmp_path / "-dash.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "workers", "program"),
    [
        ("train.py", None, "train.py"),
        ("-n auto train.py", None, "train.py"),
        ("-n 2 train.py --epochs 3 -n 5", 2, "train.py --epochs 3 -n 5"),
        ("-n2 train.py -n 5", 2, "train.py -n 5"),
        ("--workers=2 train.py --output all", 2, "train.py --output all"),
        ("-n 2 --dry-run train.py --help", 2, "train.py --help"),
        ("--dry-run -n 2 train.py -- x", 2, "train.py -- x"),
        ("-n 2 -m package.module -m x", 2, "-m package.module -m x"),
        ("-n 2 -mmodule --foo", 2, "-mmodule --foo"),
        ("--output all --grace 1.5 train.py --o --d", None, "train.py --o --d"),
        ("-n 3 -- -dash.py -x", 3, "-dash.py -x"),
    ],
)
def test_program_and_its_arguments(line, workers, program):
    options = parse(line.split())
    assert options.workers == workers
    assert options.command[1] == "-u"
    assert options.command[2:] == tuple(program.split())


def test_every_option_is_parsed():
    line = (
        "-n 2 --output none --log-dir logs --cores-per-worker 3 --gpus-per-worker 0 --grace 0 "
        "--max-restarts 4 --elastic --spares 2 --metrics-port 9400 --dry-run "
        "--nnodes 3 --node-rank 2 "
        "--rendezvous [fd00::1]:29400 --host 10.0.0.3 train.py"
    )
    options = parse(line.split())
    assert options == RunOptions(
        command=options.command,
        workers=2,
        nnodes=3,
        node_rank=2,
        rendezvous=("fd00::1", 29400),
        host="10.0.0.3",
        output="none",
        log_dir="logs",
        cores_per_worker=3,
        gpus_per_worker=0,
        grace=0.0,
        max_restarts=4,
        elastic=True,
        spares=2,
        metrics_port=9400,
        dry_run=True,
    )


@pytest.mark.exhaustive
def test_what_the_limit_of_restarts_is_by_default():
    for line, expected in [
        ("train.py", (0, 0)),
        ("--elastic train.py", (3, 1)),
        ("--elastic --spares 0 --max-restarts 0 train.py", (0, 0)),
    ]:
        options = parse(line.split())
        assert (options.max_restarts, options.spares) == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "no script given"),
        ("-n 2", "no script given"),
        ("-n", "expected one argument"),
        ("-n 0 train.py", "integer >= 1"),
        ("-n -1 train.py", "integer >= 1|expected one argument"),
        ("-n two train.py", "integer >= 1"),
        ("-m", "-m requires a module name"),
        ("nothing.py", "no such file: 'nothing.py'"),
        ("--epochs 3 train.py", "unknown option --epochs; .* after its name"),
        ("-q train.py", "unknown option -q"),
        ("--out all train.py", "unknown option --out"),
        ("--output some train.py", "invalid choice"),
        ("--grace soon train.py", "number of seconds"),
        ("--max-restarts -1 train.py", "integer >= 0|expected one argument"),
        ("--spares 2 train.py", "--spares requires --elastic"),
        ("--nnodes 2 train.py", "--nnodes requires --rendezvous"),
        ("--nnodes 2 --rendezvous a train.py", "has no port"),
        ("--nnodes 2 --node-rank 2 --rendezvous a:1 train.py", "--node-rank must be < --nnodes"),
    ],
)
def test_a_wrong_line_is_one_clear_line(line, complaint, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(line.split())
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("tfdist run: error: ")
    assert said.count("\n") == 1
    assert re.search(complaint, said)


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name in RunOptions.__dataclass_fields__.keys() - {"command", "launcher_arguments"}:
        option = "-x" if name == "forward" else f"--{name.replace('_', '-')}"
        assert option in text
    assert "examples:" in text
    assert max(map(len, text.splitlines())) <= 100
