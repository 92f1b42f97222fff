"""`python -m tests.soaking`: the plan of faults, the workers, their records, and the audit."""
