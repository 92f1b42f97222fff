"""Snapshots of the whole state of training, from which training resumes exactly."""
