"""The parts of `step_time.py`: models, backends, their processes, and the figures."""
