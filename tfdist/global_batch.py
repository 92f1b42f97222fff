"""Totals, means and rows of the global batch, for custom training loops.

In a custom `strategy.run`, a replica sees its own rows only. Some losses depend on several rows
together, for example a ratio of sums, or a comparison of each row with all other rows. Such losses
use the functions of this module to compute values of the global batch. The results are identical on
all replicas. As TensorFlow requires, the objective is the sum of the replicas' losses, and the
functions compute gradients of this sum. If a replica computes a loss from all rows, the loss must
therefore count only the replica's own rows.

The functions return their arguments unchanged in the steps of `fit` and `evaluate`, because such a
step is a program for the whole batch. The functions also return their arguments unchanged outside
of steps, and if there is only a single replica.

Example:
    >>> def step(queries, keys):  # called by `strategy.run`
    ...     everyone = tfdist.global_batch.rows(keys)
    ...     return contrastive_loss(queries, everyone) / GLOBAL_BATCH_SIZE
"""

from tfdist._src.keras.global_batch import mean, rows, total

__all__ = ["mean", "rows", "total"]
