"""Membership: after losses and arrivals, the members of a group form its next generation."""
