"""What the environment tells of this process's job, by the engine that has started it."""
