"""Building blocks of the connections between workers: addresses, sockets, TLS and frames."""
