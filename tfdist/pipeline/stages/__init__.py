"""A stage as functions: its forward pass, and its backward pass in one part or in two."""
