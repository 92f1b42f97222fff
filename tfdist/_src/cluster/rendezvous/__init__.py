"""Lets the workers of a job meet: rank 0 listens, and the other workers connect to it."""
