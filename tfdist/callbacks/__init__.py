"""Keras callbacks for training on many workers."""

from __future__ import annotations

from tfdist.callbacks.replica_audit import ReplicaAudit

__all__ = ["ReplicaAudit"]
