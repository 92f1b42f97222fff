"""Traces the forward and backward pass of a stage, and makes functions that run them."""
