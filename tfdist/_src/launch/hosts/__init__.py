"""Connects the launchers of several hosts; they exchange messages while the job runs."""
