"""Which rank holds which stages, and which values."""
