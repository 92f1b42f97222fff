"""Reads the flight logs that workers write when a collective fails or stalls, and explains them."""
