"""The benchmark of a training step: its models, backends, worker processes, and figures."""
