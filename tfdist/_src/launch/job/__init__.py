"""The workers of one host: planning, starting, supervising, logging and stopping them."""
