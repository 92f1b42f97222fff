"""The metrics of this process, computed on each scrape."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector as BaseCollector

from tfdist._src.cluster.this_worker import topology
from tfdist._src.comm import tracing
from tfdist._src.comm.communicator_interface import Traffic
from tfdist._src.comm.functions import statistics
from tfdist._src.comm.tracing import Activity
from tfdist._src.monitoring.training import BOUNDS, Histogram, Trained, record
from tfdist._version import __version__


@dataclass(frozen=True)
class Snapshot:
    """The state of this process, and its counts since it started.

    Attributes:
        rank: its rank in the job.
        workers: the number of workers in the job.
        host: the name of its host.
        strategy: the class of its strategy.
        trained: its steps and their rows.
        activity: what they have waited for; None if the native core does not run.
        sent_bytes: sent to other hosts by the native core; None if it does not run, or no longer.
        device_bytes: of the tensors in its GPUs' collectives that did not pass through the hosts'
            memory; None as for `sent_bytes`.
        recoveries: how often training has gone on after the loss of a worker.
    """

    rank: int
    workers: int
    host: str
    strategy: str
    trained: Trained
    activity: Activity | None = None
    sent_bytes: int | None = None
    device_bytes: int | None = None
    recoveries: int = 0


_strategy = ""
_host = ""


def describe(strategy: str, host: str) -> None:
    """Records the class of the strategy that this process has made, and its host if it is set."""
    global _strategy, _host
    _strategy, _host = strategy, host


def take() -> Snapshot:
    """The state now; from any thread."""
    job, waited = topology(), tracing.read()
    traffic = None if waited is None else _traffic()
    return Snapshot(
        rank=job.rank,
        workers=job.size,
        host=_host or socket.gethostname(),
        strategy=_strategy,
        trained=record.read(),
        activity=waited,
        sent_bytes=None if traffic is None else traffic.sent_bytes,
        device_bytes=None if traffic is None else traffic.device_bytes,
        recoveries=record.recoveries,
    )


def _traffic() -> Traffic | None:
    try:
        return statistics()
    except RuntimeError:  # The process is about to end and has left its groups.
        return None


class Collector(BaseCollector):
    """This process's metrics, for any registry of `prometheus_client`.

    With `TFDIST_METRICS_PORT` tfdist serves them itself. A process that already serves metrics
    adds them to its own with this class, before it calls `fit`.

    Args:
        snapshot: returns the values; those of this process by default.

    Example:
        ```python
        prometheus_client.REGISTRY.register(tfdist.monitoring.Collector())
        ```
    """

    def __init__(self, snapshot: Callable[[], Snapshot] | None = None) -> None:
        self._snapshot = snapshot or take
        record.keeps_durations = True

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; those of the native core only if it runs."""
        now = self._snapshot()
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
            "Times that training went on after a loss.",
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
        "tfdist_wait_seconds", "Time in which steps could not go on, by cause.", labels=["for"]
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
