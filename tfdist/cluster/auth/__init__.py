"""How two workers identify and authenticate one another when they connect."""
