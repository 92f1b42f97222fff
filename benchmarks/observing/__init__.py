"""The benchmark of observing: ways to watch a training, the workers' processes, and the figures."""
