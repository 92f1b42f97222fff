"""The benchmark of recovery: the models, the worker processes, and the figures."""
