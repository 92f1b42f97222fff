"""Control connections: rank 0 is the coordinator, all other ranks are agents."""
