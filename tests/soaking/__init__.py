"""The parts of `tests/soak.py`: the plan of faults, the workers, their records, and the audit."""
