"""Training on Spark."""
