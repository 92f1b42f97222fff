"""Optimizers that apply the summed gradients of all replicas."""
