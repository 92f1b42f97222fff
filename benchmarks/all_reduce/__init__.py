"""The benchmark of all-reduces: backends, their ranks, hosts, rounds and figures."""
