"""Benchmarks of tfdist and of other libraries. Run one with `python -m benchmarks.NAME`."""
