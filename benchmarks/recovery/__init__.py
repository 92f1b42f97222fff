"""The parts of `recovery.py`: the models, the workers' processes, and the figures."""
