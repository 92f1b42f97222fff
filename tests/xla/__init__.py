"""Tests of `tfdist._src.xla`."""
