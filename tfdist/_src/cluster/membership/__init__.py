"""Forms the next generation of a group after members are lost or new processes want to join."""
