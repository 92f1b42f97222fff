"""Measures the preprocessing of input pipelines on several workers."""
