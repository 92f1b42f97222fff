"""Helpers for the tests: ranks, groups, tiers and references."""
