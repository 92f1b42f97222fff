"""The metrics as a scraper reads them, and what the dashboard asks of them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

from tfdist import __version__
from tfdist._src.comm.tracing import Activity
from tfdist._src.monitoring.collector import Collector
from tfdist._src.monitoring.metrics_reading import MetricsReading
from tfdist._src.monitoring.training import BOUNDS, Histogram, Trained, record

DASHBOARD = Path(__file__).parents[2] / "docs" / "guide" / "dashboard.json"


def scraped(snapshot):
    keeps = record.keeps_durations
    registry = prometheus_client.CollectorRegistry()
    registry.register(Collector(lambda: snapshot))
    record.keeps_durations = keeps
    text = prometheus_client.generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {(s.name.removeprefix("tfdist_"), *s.labels.values()): s.value for s in samples}


def test_every_count_is_exported_in_base_units():
    seconds = Histogram()
    for duration, times in [(0.0009, 1), (0.001, 2), (0.0011, 4), (59.0, 1), (100.0, 8)]:
        seconds.observe(duration, times)
    activity = Activity(7, 1.5, 0.25, 0.125, {"all_reduce": 9, "send": 0})
    trained = Trained(16, 43, 86, seconds)
    values = scraped(
        MetricsReading(1, 4, "node-a", "AStrategy", trained, activity, 1 << 40, 1 << 30)
    )
    buckets = {key[1]: values.pop(key) for key in [*values] if key[0] == "step_seconds_bucket"}
    assert [float(le) for le in buckets] == [*BOUNDS, float("inf")]
    # Steps of 60 ms do not look like ones of 100 ms.
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(BOUNDS))
    assert [*buckets.values()] == [3] + (len(BOUNDS) - 2) * [7] + [8, 16]
    assert abs(values.pop(("step_seconds_sum",)) - 859.0073) < 1e-9
    assert values == {
        ("info", "node-a", "1", "AStrategy", __version__): 1,
        ("workers",): 4,
        ("recoveries_total",): 0,
        ("rows_total",): 43,
        ("step_seconds_count",): 16,
        ("wait_seconds_total", "input"): 1.5,
        ("wait_seconds_total", "workers"): 0.25,
        ("wait_seconds_total", "network"): 0.125,
        ("collectives_total", "all_reduce"): 9,
        ("collectives_total", "send"): 0,
        ("sent_bytes_total",): 1 << 40,
        ("device_bytes_total",): 1 << 30,
    }
    # What the core counts is unknown without it, and not zero.
    without = scraped(MetricsReading(0, 1, "", "", Trained()))
    assert not [
        key for key in without if key[0].startswith(("wait", "collectives", "sent", "device"))
    ]


def test_the_dashboard_asks_for_what_there_is():
    snapshot = MetricsReading(0, 1, "", "", Trained(), Activity(operations={"all_reduce": 1}), 0, 0)
    existing = {f"tfdist_{key[0]}" for key in scraped(snapshot)}
    queries = expressions()
    asked = [set(re.findall(r"\btfdist_\w+", query)) for query in queries]
    assert len(queries) >= 8 and all(asked)
    assert set().union(*asked) <= existing
    # And for all of it.
    assert set().union(*asked) == existing - {"tfdist_step_seconds_sum"}
    dashboard = json.loads(DASHBOARD.read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert dashboard["schemaVersion"] >= 38


def expressions() -> list[str]:
    """The queries of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]
