"""A callback that checks that all replicas hold the same weights."""

from typing import Any

from tfdist._src.callbacks.step_count import StepCount
from tfdist._src.keras.fit.callback import Callback
from tfdist._src.keras.fit.compared_state import different_copies
from tfdist._src.keras.optimizers import applying
from tfdist._src.pipeline.model import PipelineModel
from tfdist._src.strategy.extended import extended_if_ours, extended_of
from tfdist.errors import ReplicaMismatchError


class ReplicaAudit(Callback):
    """Checks that every weight is bitwise equal on all replicas of all workers, using hashes.

    Synchronous training keeps the weights of the replicas equal. To detect errors, `fit` compares
    the values that were assigned between steps and, every few hundred steps, samples of all
    weights. This callback compares all weights completely, so that you can find out when they begin
    to differ. A comparison takes about a second per gigabyte of weights. In a PipelineModel, each
    weight is compared across the workers that hold it.

    Args:
        every: the number of batches between comparisons. There is another comparison after the last
            batch.

    Raises:
        ValueError: `every` is not a positive integer.
        ProgramMismatchError: in training, if not all workers have this callback.
        ReplicaMismatchError: in training, on all workers; the message names the first variable that
            differs, and the workers on which it differs.

    Example:
        ```python
        model.fit(dataset, callbacks=[tfdist.callbacks.ReplicaAudit(every=100)])
        ```
    """

    same_on_all_workers = True

    def __init__(self, every: int = 100) -> None:
        super().__init__()
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                f"`every` must be a positive number of batches. Received: {every!r}. "
                "Pass an integer such as 100."
            )
        self._every = every
        self._count = StepCount()

    def __repr__(self) -> str:
        return f"ReplicaAudit(every={self._every})"

    def on_train_begin(self, logs: Any = None) -> None:
        self._count = StepCount()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._count.end_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._count.begin_batch(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count.end_batch(batch)
        if self._count.completes(self._every):
            self._compare()

    def on_train_end(self, logs: Any = None) -> None:
        self._compare()

    def state_dict(self) -> dict[str, Any]:
        return self._count.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count.load_state_dict(state)

    def _compare(self) -> None:
        strategy = self.model.distribute_strategy
        if extended_if_ours(strategy) is None:
            return
        found = different_copies(extended_of(strategy).group, _copies_of(self.model))
        if found:
            raise ReplicaMismatchError(
                f"After {self._count.done} batches the replicas are not equal: {found}. Look for "
                "code that changes weights on one worker only, or draws random numbers separately "
                "on each."
            )


def _copies_of(model: Any) -> dict[str, Any]:
    """Returns this worker's weights and optimizer variables, if other workers hold copies of them.

    Args:
        model: a Keras model; may be a PipelineModel.

    Returns:
        Keras variables, keyed by names. Variables with the same name on different workers are
        copies of one variable.
    """
    if not isinstance(model, PipelineModel):
        return applying.replicated_variables(model)
    pipeline_rank = model.distribute_strategy.pipeline_rank
    numbers = {id(v): i for i, v in enumerate(model.partition.graph.model.variables)}
    found = {f"weight {numbers[id(v)]}": v for v in model.weights}
    for name, optimizer in applying.optimizers_of(model).items():
        for i, variable in enumerate(applying.replicated_state(optimizer)):
            found[f"pipeline rank {pipeline_rank}, {name} {i}"] = variable
    return found
