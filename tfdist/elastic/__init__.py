"""Training that survives: snapshots of its whole state, and exact resume from them."""
