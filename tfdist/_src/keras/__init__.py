"""Keras's `fit`, `evaluate` and `predict` under a tfdist strategy.

Keras leaves it to `tf.distribute` to combine the results of the replicas. Wherever this would give
another result than training in a single process, the hooks of this package replace Keras's code.
The hooks have an effect only under a tfdist strategy.
"""
