"""The benchmark of convergence: its tasks, the settings of the codecs, the workers, the table."""
