"""Runs a folder of Keras scripts undistributed, with one worker and with two, and compares.

Each script runs as it is, all of it inside the strategy's scope, with small made-up data in the
place of what it downloads, and its trainings cut short. If the results differ, it runs again
undistributed with weights that differ by rounding: how much does that alone change? For example
with a copy of the `guides/` and `examples/` of https://github.com/keras-team/keras:

    python -m tests.guides path/to/scripts --results results.jsonl --markdown table.md
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.guides import table

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("runner.py")
STANDINS = {"IPython", "tqdm"}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.guides",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the scripts are, also in its folders")
    parser.add_argument(
        "--only", default="", help="run scripts whose path contains one of these, a,b"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run (300)")
    parser.add_argument("--results", type=Path, help="keep results here; go on where it ended")
    parser.add_argument("--markdown", type=Path, help="write the table here as Markdown")
    parser.add_argument("--logs", type=Path, help="keep what the scripts printed in this folder")
    options = parser.parse_args()
    known = _read(options.results)
    for script in sorted(options.folder.rglob("*.py")):
        name = str(script.relative_to(options.folder))
        if name in known or not any(part in name for part in options.only.split(",")):
            continue
        known[name] = _outcomes(script, name, options)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps([name, known[name]]) + "\n")
    ran = {n: o for n, o in known.items() if isinstance(o, list)}
    rows = [table.row(name.removesuffix(".py"), ran[name]) for name in sorted(ran)]
    left_out = "\n".join(f"- {n}: {o}" for n, o in sorted(known.items()) if n not in ran)
    print(f"\n{table.text(rows)}\n\nLeft out:\n{left_out}")
    if options.markdown:
        options.markdown.write_text(f"{table.markdown(rows)}\n\nLeft out:\n\n{left_out}\n")


def _read(path: Path | None) -> dict[str, Any]:
    return dict(map(json.loads, path.read_text().splitlines())) if path and path.exists() else {}


def _outcomes(script: Path, name: str, options: argparse.Namespace) -> Any:
    """What the three runs gave, or why the script is left out."""
    if reason := _reason_to_skip(script):
        print(f"{name}: left out, {reason}", flush=True)
        return reason
    outcomes: list[dict[str, Any]] = []
    for way, workers in (("alone", 1), ("distributed", 1), ("distributed", 2), ("rounded", 1)):
        if way == "rounded" and not table.differs(outcomes):
            break
        began = time.monotonic()
        outcome = _run(script, name, way, workers, options)
        outcomes.append(outcome)
        said = f"{outcome['state']}, {time.monotonic() - began:.0f} s"
        print(f"{name}: {way}, {workers}: {said} {outcome['error'] or ''}", flush=True)
        if way == "alone" and outcome["state"] != "ok":
            return f"undistributed it ends with {outcome['error']}"
    return outcomes


def _reason_to_skip(script: Path) -> str:
    """Why a script cannot run here; empty if it can."""
    names = set()
    try:
        tree = ast.parse(script.read_text())
    except SyntaxError as error:
        return f"is not Python: {error.msg} in line {error.lineno}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    missing = [n for n in sorted(names - STANDINS) if importlib.util.find_spec(n) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def _run(
    script: Path, name: str, way: str, workers: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One run of a script, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="tfdist-guides-"))
    log = folder / "output"
    command = [str(RUNNER), str(script.absolute()), way, str(folder / "results")]
    launch = ["-m", "tfdist", "run", "-n", str(workers)] if workers > 1 else []
    environment = {
        "TFDIST_COLLECTIVE_TIMEOUT": str(options.timeout / 2),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "CUDA_VISIBLE_DEVICES": "",
        "KERAS_BACKEND": "tensorflow",
    }
    (folder / "work").mkdir()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *launch, *command],
            cwd=folder / "work",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(options.timeout)
            outcome = _outcome(folder, workers, process.returncode)
        except subprocess.TimeoutExpired:
            late = f"did not end in {options.timeout:.0f} s"
            outcome = {"state": "no end", "error": late, "logs": []}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
        kept = options.logs / f"{name.replace('/', '-')}.{way}.{workers}"
        kept.write_bytes(log.read_bytes())
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _outcome(folder: Path, workers: int, code: int) -> dict[str, Any]:
    files = [folder / f"results.{rank}" for rank in range(workers)]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    failed = [result for result in found if result["error"]]
    if failed:
        return {**failed[0], "state": "error"}
    if code or len(found) < workers:
        lost = {"error": f"ended with exit code {code}", "logs": []}
        return {**lost, "state": "error"}
    return {**found[0], "state": "ok"}


if __name__ == "__main__":
    main()
