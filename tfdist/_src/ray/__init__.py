"""Training on Ray."""
