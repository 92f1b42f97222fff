"""The benchmark of observing: the ways to watch training, the worker processes, the figures."""
