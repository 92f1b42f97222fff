"""Every C++ test, plain and with sanitizers; longer runs of the same are in docs/native.md."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.native import compilation
from tfdist._src.options import NativeOptions

# Compiling with sanitizers takes minutes.
pytestmark = pytest.mark.timeout(1800)

# variant -> test -> runs, each with its arguments. Forked processes are nothing for the thread
# sanitizer, and what mostly waits, or goes through much data, says nothing new under a sanitizer.
RUNS = {
    "plain": {
        "activity": ((),),
        "arithmetic": ((),),
        "clock_offset": ((),),
        "codec": ((),),
        "collectives": (("threads", "quick"), ("processes", "quick"), ("processes",), ("many",)),
        "compressed": (("quick",), ()),
        "copies": ((),),
        "data": (("20000",),),
        "device": ((),),
        "device_choices": ((),),
        "device_codecs": ((),),
        "device_compressed": ((),),
        "device_faults": ((),),
        "device_gpus": ((),),
        "device_kernels": ((),),
        "device_obstacles": ((),),
        "device_orders": ((),),
        "device_path": ((),),
        "device_processes": ((),),
        "device_rounds": (("60",),),
        "device_selection": ((),),
        "device_stream_waits": ((),),
        "endings": (("quick",), ()),
        "flight_log": ((),),
        "frames": (("20000",),),
        "garbage": ((),),
        "groups": ((),),
        "json": ((),),
        "losses": (("kill", "quick"), ("stop", "one"), ("kill",), ("stop",)),
        "mismatches": (("quick",), ()),
        "nccl": ((),),
        "nccl_endings": ((),),
        "nccl_library": ((),),
        "order": ((),),
        "parting": ((),),
        "patience": ((),),
        "recorder": ((),),
        "reduce": ((),),
        "rounding": ((),),
        "rounds": (("6",), ("60",)),
        "segment": (("4000",), ("20000",)),
        "silence": ((),),
        "sparse": ((),),
        "state": ((),),
        "waiting": ((),),
    },
    "address": {
        "activity": ((),),
        "arithmetic": ((),),
        "clock_offset": ((),),
        "codec": ((),),
        "collectives": (("processes", "quick"),),
        "compressed": (("quick",),),
        "copies": ((),),
        "data": (("20000",),),
        "device": ((),),
        "device_choices": ((),),
        "device_codecs": ((),),
        "device_compressed": ((),),
        "device_faults": ((),),
        "device_gpus": ((),),
        "device_kernels": ((),),
        "device_obstacles": ((),),
        "device_orders": ((),),
        "device_path": ((),),
        "device_processes": ((),),
        "device_rounds": (("20",),),
        "device_selection": (("small",),),
        "device_stream_waits": ((),),
        "endings": (("quick",),),
        "flight_log": ((),),
        "frames": (("20000",),),
        "garbage": ((),),
        "groups": ((),),
        "json": ((),),
        "losses": (("kill",),),
        "mismatches": (("quick",),),
        "nccl": ((),),
        "nccl_endings": ((),),
        "nccl_library": ((),),
        "order": ((),),
        "parting": ((),),
        "patience": ((),),
        "recorder": ((),),
        "reduce": ((),),
        "rounding": ((),),
        "rounds": (("20",),),
        "segment": (("20000",),),
        "silence": ((),),
        "sparse": ((),),
        "state": ((),),
        "waiting": ((),),
    },
    "thread": {
        "activity": ((),),
        "arithmetic": ((),),
        "clock_offset": ((),),
        "collectives": (("threads", "quick"), ("many",)),
        "compressed": (("quick",),),
        "device": ((),),
        "device_codecs": ((),),
        "device_compressed": ((),),
        "device_faults": ((),),
        "device_gpus": ((),),
        "device_kernels": ((),),
        "device_obstacles": ((),),
        "device_orders": ((),),
        "device_path": ((),),
        "device_processes": ((),),
        "device_rounds": (("20",),),
        "device_selection": (("small",),),
        "device_stream_waits": ((),),
        "endings": (("quick",),),
        "flight_log": (("threads",),),
        "garbage": ((),),
        "groups": ((),),
        "mismatches": (("quick",),),
        "nccl": ((),),
        "nccl_endings": ((),),
        "nccl_library": ((),),
        "order": ((),),
        "patience": ((),),
        "recorder": ((),),
        "rounds": (("20",),),
        "silence": ((),),
        "state": ((),),
    },
}
# Of the plain ones, exhaustive as those with sanitizers: it takes seconds to compile each of them.
OF_GPUS = {
    "device",
    "device_choices",
    "device_faults",
    "device_gpus",
    "device_kernels",
    "device_obstacles",
    "device_orders",
    "device_path",
    "device_processes",
    "device_rounds",
    "device_selection",
    "device_stream_waits",
    "nccl",
    "nccl_endings",
    "nccl_library",
}
# Of the plain ones, too.
LONG = {
    ("collectives", ("processes",)),
    ("collectives", ("many",)),
    ("compressed", ()),
    ("device_codecs", ()),
    ("device_compressed", ()),
    ("device_rounds", ("60",)),
    ("endings", ()),
    ("losses", ("kill",)),
    ("losses", ("stop",)),
    ("mismatches", ()),
    ("rounds", ("60",)),
    ("segment", ("20000",)),
}
CASES = [
    pytest.param(
        variant,
        name,
        run,
        id="-".join((variant, name, *run)),
        marks=exhaustive if variant != "plain" or name in OF_GPUS or (name, run) in LONG else (),
    )
    for variant, tests in RUNS.items()
    for name, runs in tests.items()
    for run in runs
]


@pytest.mark.parametrize(("variant", "name", "arguments"), CASES)
def test(execute, variant, name, arguments):
    execute(variant, name, *arguments)


def test_every_test_is_run():
    files = {path.stem for path in (compilation.SOURCE / "tests").glob("*_test.cc")}
    assert files == {f"{name}_test" for name in RUNS["plain"]}
    assert RUNS["address"].keys() == RUNS["plain"].keys()


def test_what_only_tests_on_a_gpu_call_compiles():
    flags = compilation.read_recipe(compilation.find_tensorflow()).compile_core
    found = compilation.find_compiler(NativeOptions.from_environment().compiler)
    source = Path(__file__).parents[1] / "gpu" / "on_pointers.cc"
    command = [*found.command, *flags, "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
