"""How long a job takes to start, with tfdist and with other libraries."""
