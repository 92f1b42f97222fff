"""Helpers of the tests: ranks, groups, tiers, references; no tests."""
