"""Saves and loads the state of the full model, which is distributed over its stages."""
