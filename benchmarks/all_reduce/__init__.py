"""The parts of `all_reduce.py`: backends, their ranks, hosts, rounds and figures."""
