"""Communicators, collectives as TensorFlow operations, and records of their activity."""
