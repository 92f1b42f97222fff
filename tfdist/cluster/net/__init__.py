"""Addresses, sockets, TLS and frames, which the connections between workers are made of."""
