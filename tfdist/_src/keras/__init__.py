"""Keras's `fit`, `evaluate` and `predict` under a tfdist strategy.

Keras relies on TensorFlow to merge the replicas. Where this does not produce the result of a single
process, the hooks of this package replace Keras's code. They act only under a tfdist strategy;
without one, Keras is unchanged.
"""
