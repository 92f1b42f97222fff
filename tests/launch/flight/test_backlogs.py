"""What is found in made-up logs of workers between which data is on its way."""

from __future__ import annotations

from tests.launch.flight.logs import diagnosis, group, link, log, name, record
from tfdist._src.launch.flight.report import sentences

WAITING = [record(1, 1, 1.5), record(2, 28.8)]


def test_a_slow_transfer_names_the_workers_at_its_ends(tmp_path):
    between = f"from {name(2)} to {name(0)}"
    # Case -> the connections of each rank, and the end of the text.
    cases = {
        "nothing is on its way": ([[link(1)], [link(2)], [link(0)]], "is slow or stuck."),
        "it is slow": (
            [[link(1, 9_000, 900_000_000)], [link(2)], [link(0, 410_000, 120_000, 40)]],
            f"Data is on its way {between}: 0.41 MB, at 0.12 MB/s. Look at the network between "
            "them.",
        ),
        "it does not move": (
            [[], [], [link(0, 410_000, 120_000, 12_300)]],
            f"Data is on its way {between}: 0.41 MB, and nothing has arrived for 12.3 s. Look at "
            "the network between them.",
        ),
        "for longer than the operation lasts": (
            [[], [], [link(0, 410_000, 0, 99_000)]],
            "nothing has arrived for 31.2 s. Look at the network between them.",
        ),
        "to several": (
            [[], [], [link(0, 250_000, 100_000), link(1, 150_000, 50_000)]],
            f"from {name(2)} to workers 0 and 1: 0.4 MB, at 0.15 MB/s. Look at the network of "
            f"{name(2)}.",
        ),
        "from several": (
            [[link(2, 100_000, 100_000)], [link(2, 150_000, 50_000)], []],
            f"from workers 0 and 1 to {name(2)}: 0.25 MB, at 0.15 MB/s. Look at the network of "
            f"{name(2)}.",
        ),
        "everywhere": (
            [[link(1, 100, 100)], [link(2, 100, 90)], [link(0, 100, 80)]],
            f"from {name(2)} to {name(0)}, from {name(1)} to {name(2)} and from {name(0)} to "
            f"{name(1)}: 0.0003 MB, at 0.00027 MB/s. Look at the network.",
        ),
        "just written": (
            [[], [], [link(0, 100)]],
            f"{between}: 0.0001 MB. Look at the network between them.",
        ),
    }
    for case, (links, end) in cases.items():
        logs = [log(r, group(r, WAITING, (0, 1, 2), links=links[r]), size=3) for r in range(3)]
        (finding,) = diagnosis(tmp_path, *logs).findings
        (text,) = sentences(finding)
        assert finding.kind == "transfer" and text.endswith(end), (case, text)
    del logs[0]["communicators"][0]["links"]  # of an earlier version
    (finding,) = diagnosis(tmp_path, *logs).findings
    assert finding.kind == "transfer"
