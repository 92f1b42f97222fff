"""Metrics, step times and timelines of this process."""
