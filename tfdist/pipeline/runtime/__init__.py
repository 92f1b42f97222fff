"""The execution of a training, evaluation or prediction step on a rank."""
