"""The metrics of this process, computed on each scrape."""

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector as BaseCollector

from tfdist._src.comm.tracing import Activity
from tfdist._src.monitoring.metrics_reading import MetricsReading, read_metrics
from tfdist._src.monitoring.training import BOUNDS, Histogram, record
from tfdist._version import __version__


class Collector(BaseCollector):
    """This process's metrics, for any registry of `prometheus_client`.

    If `TFDIST_METRICS_PORT` is set, tfdist serves these metrics itself. If the process already
    serves metrics, register an object of this class with the process's own registry before the call
    of `fit`.

    Args:
        snapshot: a function that returns the values of the metrics; by default, the values of this
            process.

    Example:
        ```python
        prometheus_client.REGISTRY.register(tfdist.monitoring.Collector())
        ```
    """

    def __init__(self, snapshot: Callable[[], MetricsReading] | None = None) -> None:
        self._read = snapshot or read_metrics
        record.keeps_durations = True

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics, including the metrics of the native core if the core runs."""
        now = self._read()
        labels = {
            "version": __version__,
            "rank": str(now.rank),
            "host": now.host,
            "strategy": now.strategy,
        }
        yield InfoMetricFamily("tfdist", "This worker.", labels)
        yield GaugeMetricFamily("tfdist_workers", "Workers in the job.", now.workers)
        yield CounterMetricFamily(
            "tfdist_recoveries",
            "Times that training continued after a loss.",
            now.recoveries,
        )
        yield CounterMetricFamily(
            "tfdist_rows", "Rows trained by this worker.", float(now.trained.rows)
        )
        yield _steps(now.trained.seconds)
        if now.activity is not None:
            yield _waiting(now.activity)
            yield _collectives(now.activity)
        if now.sent_bytes is not None:
            yield CounterMetricFamily(
                "tfdist_sent_bytes", "Bytes sent to other hosts.", float(now.sent_bytes)
            )
        if now.device_bytes is not None:
            yield CounterMetricFamily(
                "tfdist_device_bytes",
                "Bytes of tensors in collectives from GPU to GPU.",
                float(now.device_bytes),
            )

    def describe(self) -> Iterator[Metric]:
        """Yields the metrics without their values."""
        yield InfoMetricFamily("tfdist", "")
        yield GaugeMetricFamily("tfdist_workers", "")
        counters = "recoveries", "rows", "wait_seconds", "collectives", "sent_bytes", "device_bytes"
        for name in counters:
            yield CounterMetricFamily(f"tfdist_{name}", "")
        yield HistogramMetricFamily("tfdist_step_seconds", "")


def _steps(seconds: Histogram) -> HistogramMetricFamily:
    bounds = [*map(str, BOUNDS), "+Inf"]
    counts = map(float, accumulate(seconds.counts))
    return HistogramMetricFamily(
        "tfdist_step_seconds",
        "Duration of the training steps of fit.",
        buckets=list(zip(bounds, counts, strict=True)),
        sum_value=seconds.total,
    )


def _waiting(activity: Activity) -> CounterMetricFamily:
    family = CounterMetricFamily(
        "tfdist_wait_seconds", "Time that steps waited, by cause.", labels=["for"]
    )
    for cause in ("input", "workers", "network"):
        family.add_metric([cause], getattr(activity, cause))
    return family


def _collectives(activity: Activity) -> CounterMetricFamily:
    family = CounterMetricFamily(
        "tfdist_collectives", "Completed collectives and messages, by kind.", labels=["kind"]
    )
    for kind, count in activity.operations.items():
        family.add_metric([kind], float(count))
    return family
