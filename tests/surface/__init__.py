"""What users may rely on: names, signatures, command-line flags and environment variables."""
