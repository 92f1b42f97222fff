"""Identifies and authenticates two workers when one of them connects to the other."""
