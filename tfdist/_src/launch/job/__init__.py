"""Plans, starts, observes and stops the workers of one host, and routes their output."""
