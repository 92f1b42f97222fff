"""The benchmark of gradient compression: its codecs, tasks, workers, rounds, and figures."""
