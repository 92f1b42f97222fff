"""Snapshots of a whole training, and exact resume from them."""
