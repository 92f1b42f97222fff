"""Values over the global batch in a custom loop: totals, means and rows.

In a custom `strategy.run`, a replica sees its own rows. Code that couples rows (a loss that is a
ratio of sums, or compares each row with all others) uses these functions to get the values of the
global batch. The results are identical on all replicas. As TensorFlow requires, the objective is
the sum of the replicas' losses. The functions have the gradient of this sum, so a loss that a
replica computes from all rows must count its own rows only.

A step of `fit` and `evaluate` is a program for the whole batch. There, in a single process, and
outside of steps, the functions return their arguments unchanged.

Example:
    >>> def step(queries, keys):  # called by `strategy.run`
    ...     everyone = tfdist.global_batch.rows(keys)
    ...     return contrastive_loss(queries, everyone) / GLOBAL_BATCH_SIZE
"""

from tfdist._src.keras.global_batch import mean, rows, total

__all__ = ["mean", "rows", "total"]
