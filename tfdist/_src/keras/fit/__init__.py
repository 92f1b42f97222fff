"""Keras's `fit`, `evaluate` and `predict` on several replicas."""
