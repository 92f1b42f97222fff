"""Full meshes: a connection between any two ranks of a group, and memory shared on each host."""
