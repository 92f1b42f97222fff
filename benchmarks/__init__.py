"""Measurements of tfdist against its peers; run one with `python -m benchmarks.NAME`."""
