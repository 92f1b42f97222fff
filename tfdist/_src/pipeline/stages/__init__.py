"""A stage as functions: its forward pass, and its backward pass, whole or split in two."""
