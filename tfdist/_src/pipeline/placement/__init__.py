"""Decides which rank holds which stages, and which variables get values on a rank."""
