"""Functions for addresses, sockets, TLS and frames, used by all connections between workers."""
