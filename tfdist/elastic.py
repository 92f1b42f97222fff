"""Snapshots and exact resume; recovery when workers are lost or come."""

from tfdist._src.recovery.group_info import GroupInfo

__all__ = ["GroupInfo"]
