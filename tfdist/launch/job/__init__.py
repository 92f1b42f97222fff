"""The workers of one host: how they are planned, started, watched, logged and stopped."""
