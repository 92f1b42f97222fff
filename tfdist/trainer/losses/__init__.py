"""Losses, metrics and random numbers, which are those of one process."""
