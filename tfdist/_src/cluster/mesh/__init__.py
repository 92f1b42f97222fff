"""Connects each pair of ranks of a group, and shares memory between the ranks of each host."""
