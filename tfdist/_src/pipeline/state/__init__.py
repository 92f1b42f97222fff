"""The state of the full model, assembled from its stages for files and weights."""
