"""The benchmark of compression: codecs, the task, its workers, the rounds, and the figures."""
