"""The parts of `compression.py`: codecs, the task, its workers, the rounds, and the figures."""
