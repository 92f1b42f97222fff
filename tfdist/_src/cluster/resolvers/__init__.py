"""Resolvers, which read this process's job from the environment that its engine has set."""
