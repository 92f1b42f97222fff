"""Keras's `fit`, `evaluate` and `predict` on many replicas."""
