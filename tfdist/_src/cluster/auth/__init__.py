"""Identification and authentication of two workers when they connect."""
