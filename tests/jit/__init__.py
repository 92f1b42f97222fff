"""Tests of `tfdist.jit`."""
