"""The C++ tests as programs, plain and with sanitizers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import cache

import pytest

from tests.cpp.compiling import VARIANTS, Programs, Toolchain
from tfdist._src import native
from tfdist._src.native import store
from tfdist._src.options import NativeOptions

# No program takes so long on a slow machine; one that hangs does.
SECONDS = 1500


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Callable[[str], Programs]:
    """Makes the programs of a variant that this session runs, once."""
    names = {"flight_log"}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            names.add(str(item.callspec.params.get("name", "")))

    @cache
    def make(variant: str) -> Programs | str:
        folder = request.config.cache.mkdir(f"csrc-{variant}")
        library = native.ensure(NativeOptions.from_environment()).core
        toolchain = Toolchain(VARIANTS[variant], folder, library if variant == "plain" else None)
        # One process compiles; another one that runs tests finds what it has made.
        with store.held(folder.with_suffix(".lock"), SECONDS, print):
            return toolchain.problem() or toolchain.programs(names)

    def get(variant: str) -> Programs:
        made = make(variant)
        if isinstance(made, str):
            pytest.skip(f"no runtime for {VARIANTS[variant][-1]}: {made}")
        return made

    return get


@pytest.fixture
def execute(programs: Callable[[str], Programs]) -> Callable[..., None]:
    """Runs a program; its output is the failure's message."""

    def run(variant: str, name: str, *arguments: str) -> None:
        made = programs(variant)
        command = [str(made.tests[name]), *arguments]
        fakes = {f"FAKE_{fake.upper()}": str(path) for fake, path in made.fakes.items()}
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **fakes},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace")
            pytest.fail(f"{name} {' '.join(arguments)} hangs after:\n{output}", pytrace=False)
        if done.returncode:
            pytest.fail(
                f"{name} {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}",
                pytrace=False,
            )

    return run
