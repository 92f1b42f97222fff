"""The benchmark of observing: ways to watch training, the workers' processes, and the figures."""
