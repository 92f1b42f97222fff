"""The session of a group: rank 0 is the coordinator, and all other ranks connect to it as agents.

A session exchanges small messages between the ranks and detects lost workers.
"""
