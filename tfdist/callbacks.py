"""Keras callbacks for distributed training."""

from tfdist._src.callbacks.backup_and_restore import BackupAndRestore
from tfdist._src.callbacks.compression_schedule import CompressionSchedule
from tfdist._src.callbacks.elastic import Elastic
from tfdist._src.callbacks.learning_rate_warmup import LearningRateWarmup
from tfdist._src.callbacks.replica_audit import ReplicaAudit
from tfdist._src.callbacks.straggler_monitor import StragglerMonitor
from tfdist._src.callbacks.throughput_logger import ThroughputLogger
from tfdist._src.callbacks.timeline import Timeline
from tfdist._src.callbacks.traffic_logger import TrafficLogger
from tfdist._src.keras.fit.callback import Callback

__all__ = [
    "BackupAndRestore",
    "Callback",
    "CompressionSchedule",
    "Elastic",
    "LearningRateWarmup",
    "ReplicaAudit",
    "StragglerMonitor",
    "ThroughputLogger",
    "Timeline",
    "TrafficLogger",
]
