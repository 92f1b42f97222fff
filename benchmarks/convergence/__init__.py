"""The benchmark of convergence: tasks, recipes, workers, and the table."""
