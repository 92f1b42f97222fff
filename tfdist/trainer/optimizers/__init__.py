"""Optimizers whose gradients are those of all replicas."""
