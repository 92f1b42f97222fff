"""What holds for all tests."""

from __future__ import annotations

import pathlib
import signal

import pytest

from tests.harness import references
from tests.harness.durations import Recorder
from tests.harness.tiers import in_part, reduce_combinations

# A job in a shell's background, or under nohup, ignores some signals, and so would the processes
# that tests start.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", metavar="FILE", help="write how long tests take")
    parser.addoption("--part", metavar="I/N", help="run part I of N of the tests, I from 1 to N")


def pytest_configure(config: pytest.Config) -> None:
    controls = not hasattr(config, "workerinput")  # rather than being one of pytest-xdist's
    if (cache := getattr(config, "cache", None)) is not None:  # None with -p no:cacheprovider
        references.keep_in(cache.mkdir("references"), tidy=controls)
    file = config.getoption("--record-durations")
    if controls and file:
        config.pluginmanager.register(Recorder(pathlib.Path(file)))


@pytest.hookimpl(tryfirst=True)  # before a marker selects items
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Decides tiers, selects a part, and sorts tests so that each group of workers starts once."""
    reduce_combinations(items)
    if part := config.getoption("--part"):
        try:
            chosen = [item for item in items if in_part(item.nodeid, part)]
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        config.hook.pytest_deselected(items=[*{*items} - {*chosen}])
        items[:] = chosen
    places: dict[tuple[object, ...], int] = {}

    def place(*what: object) -> int:
        return places.setdefault(what, len(places))

    def group(item: pytest.Item) -> str:
        return str(item.callspec.params.get("group")) if hasattr(item, "callspec") else ""

    items.sort(key=lambda item: (place(item.path), place(item.path, group(item))))
