"""Connects the launchers of several hosts, and exchanges their messages while the job runs."""
