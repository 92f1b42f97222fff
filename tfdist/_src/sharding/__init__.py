"""Sharded optimizer state (ZeRO-1): each worker keeps and updates one shard."""
