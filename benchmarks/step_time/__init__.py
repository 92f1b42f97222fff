"""The benchmark of a training step: models, backends, their processes, and the figures."""
