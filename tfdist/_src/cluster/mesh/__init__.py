"""Full meshes: connections between all ranks of a group, and shared memory on each host."""
