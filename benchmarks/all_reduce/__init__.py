"""The benchmark of all-reduces: its backends, ranks, hosts, rounds, and figures."""
