"""The benchmark of joining: the time until all ranks of a job are connected."""
