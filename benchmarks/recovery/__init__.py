"""The benchmark of recovery: the models, the workers' processes, and the figures."""
