"""The parts of `observing.py`: the ways to watch, the workers' processes, and the figures."""
