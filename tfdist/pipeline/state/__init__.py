"""The state of the whole model, put together from its stages for files and weights."""
