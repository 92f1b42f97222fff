"""The parts of `convergence.py`: tasks, recipes, workers, and the table."""
