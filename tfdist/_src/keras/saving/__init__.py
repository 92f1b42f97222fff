"""Saving and loading of models and optimizers held by several workers."""
