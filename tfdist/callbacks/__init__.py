"""Keras callbacks for distributed training."""

from __future__ import annotations

from tfdist.callbacks.backup_and_restore import BackupAndRestore
from tfdist.callbacks.compression_schedule import CompressionSchedule
from tfdist.callbacks.elastic import Elastic
from tfdist.callbacks.learning_rate_warmup import LearningRateWarmup
from tfdist.callbacks.replica_audit import ReplicaAudit
from tfdist.callbacks.straggler_monitor import StragglerMonitor
from tfdist.callbacks.throughput_logger import ThroughputLogger
from tfdist.callbacks.timeline import Timeline
from tfdist.callbacks.traffic_logger import TrafficLogger

__all__ = [
    "BackupAndRestore",
    "CompressionSchedule",
    "Elastic",
    "LearningRateWarmup",
    "ReplicaAudit",
    "StragglerMonitor",
    "ThroughputLogger",
    "Timeline",
    "TrafficLogger",
]
