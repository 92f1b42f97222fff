"""Losses, metrics and random numbers with the values of a single process."""
