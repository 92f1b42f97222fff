"""Who belongs to the group: after losses and arrivals, the members form its next generation."""
