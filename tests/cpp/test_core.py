"""Every C++ test, plain and with sanitizers; docs/design/testing.md has longer runs of the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.native import compilation
from tfdist._src.options import NativeOptions

# Compiling with sanitizers takes minutes.
pytestmark = pytest.mark.timeout(1800)

# Every test program runs once without arguments in each variant, except for these: variant -> test
# -> runs, each with its arguments.
ARGUMENTS: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {
    "plain": {
        "collectives": (("threads", "quick"), ("processes", "quick"), ("processes",), ("many",)),
        "compressed": (("quick",), ()),
        "data": (("20000",),),
        "device_rounds": (("60",),),
        "endings": (("quick",), ()),
        "frames": (("20000",),),
        "losses": (("kill", "quick"), ("stop", "one"), ("kill",), ("stop",)),
        "mismatches": (("quick",), ()),
        "rounds": (("6",), ("60",)),
        "segment": (("4000",), ("20000",)),
    },
    "address": {
        "collectives": (("processes", "quick"),),
        "compressed": (("quick",),),
        "data": (("20000",),),
        "device_rounds": (("20",),),
        "device_selection": (("small",),),
        "endings": (("quick",),),
        "frames": (("20000",),),
        "losses": (("kill",),),
        "mismatches": (("quick",),),
        "rounds": (("20",),),
        "segment": (("20000",),),
    },
    "thread": {
        "collectives": (("threads", "quick"), ("many",)),
        "compressed": (("quick",),),
        "device_rounds": (("20",),),
        "device_selection": (("small",),),
        "endings": (("quick",),),
        "flight_log": (("threads",),),
        "mismatches": (("quick",),),
        "rounds": (("20",),),
        # One thread each, or forked processes, which this sanitizer cannot follow.
        **dict.fromkeys(
            (
                "codec",
                "copies",
                "data",
                "device_choices",
                "frames",
                "json",
                "losses",
                "parting",
                "reduce",
                "rounding",
                "segment",
                "sparse",
                "waiting",
            ),
            (),
        ),
    },
}
NAMES = sorted(p.name.removesuffix("_test.cc") for p in Path(__file__).parent.glob("*_test.cc"))
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
    ("clock_offset", ()),
    ("collectives", ("processes",)),
    ("collectives", ("many",)),
    ("compressed", ()),
    ("copies", ()),
    ("data", ("20000",)),
    ("device_codecs", ()),
    ("device_compressed", ()),
    ("device_rounds", ("60",)),
    ("endings", ()),
    ("endings", ("quick",)),
    ("losses", ("kill",)),
    ("losses", ("stop",)),
    ("mismatches", ()),
    ("rounding", ()),
    ("rounds", ("60",)),
    ("segment", ("4000",)),
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
    for variant, others in ARGUMENTS.items()
    for name in NAMES
    for run in others.get(name, ((),))
]


@pytest.mark.parametrize(("variant", "name", "arguments"), CASES)
def test(execute, variant, name, arguments):
    execute(variant, name, *arguments)


def test_every_exception_is_of_a_test():
    assert set().union(*ARGUMENTS.values()) | OF_GPUS <= set(NAMES)


def test_what_only_tests_on_a_gpu_call_compiles():
    flags = compilation.read_recipe(compilation.find_tensorflow()).compile_core
    found = compilation.find_compiler(NativeOptions.from_environment().compiler)
    source = Path(__file__).parents[1] / "gpu" / "on_pointers.cc"
    include = f"-I{Path(__file__).parents[1]}"  # of the tests' own headers
    command = [*found.command, *flags, include, "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
