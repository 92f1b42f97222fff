"""The benchmark of pipelines: processes that train in stages, and the figures of their steps."""
