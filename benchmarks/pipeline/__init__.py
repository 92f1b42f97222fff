"""The benchmark of pipeline parallelism: its backends, worker processes, and figures."""
