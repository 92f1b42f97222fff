"""Placement of stages, and of variables' values, on ranks."""
