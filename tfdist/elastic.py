"""Snapshots and exact resume; recovery when workers are lost or join."""

from tfdist._src.recovery.next_group import GroupInfo

__all__ = ["GroupInfo"]
