"""Reads and explains the flight logs, which workers write when a collective fails or stalls."""
