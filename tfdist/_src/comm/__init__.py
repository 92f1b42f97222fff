"""Communicators, the collectives as TensorFlow operations, and records of what they do."""
