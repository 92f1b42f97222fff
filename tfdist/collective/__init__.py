"""Collective operations over a group of replicas or workers, as the strategies see them."""
