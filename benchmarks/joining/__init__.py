"""The benchmark of joining: the ranks of tfdist and of other libraries, and their times."""
