"""Keras's `fit`, `evaluate` and `predict` under a tfdist strategy.

Keras relies on TensorFlow to merge the replicas; where this does not produce the result of a single
process, the hooks here replace Keras's code. They act only under a tfdist strategy; everything else
is unchanged.
"""
