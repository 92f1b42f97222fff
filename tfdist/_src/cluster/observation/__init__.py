"""Observers, which ask rank 0 of a running job how its workers are doing."""
