"""Timelines of a schedule, simulated or measured, and plots of them."""
