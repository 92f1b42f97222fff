"""Placement: which rank holds which stages, and which variables' values."""
