"""How Keras's `fit`, `evaluate` and `predict` run under a tfdist strategy.

Keras was written for replicas that TensorFlow merges by itself; where its way does not give the
result of one process, the hooks here replace it. They act only under a tfdist strategy, and
everything else goes on as before.
"""
