"""The strategy for one process with several devices."""

from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from tfdist._src.cluster import ResolvedJob
from tfdist._src.comm.communicator_interface import Alone
from tfdist._src.group import Group, join, join_devices
from tfdist._src.strategy.communication import (
    check_communication,
    local_devices,
    replica_communicators,
)
from tfdist._src.strategy.extended import ReplicatedExtended, extended_of

BatchStatistics = Literal["global", "replica"]
_CHOICES = ("global", "replica")


def check_batch_statistics(given: str | None) -> None:
    """Checks the `batch_statistics` argument of a strategy.

    Raises:
        ValueError: the argument is neither None, "global" nor "replica".
    """
    if given is not None and given not in _CHOICES:
        raise ValueError(
            f"`batch_statistics` must be one of {', '.join(map(repr, _CHOICES))}. "
            f"Received: {given!r}."
        )


def agreed_batch_statistics(group: Group, given: str | None) -> str:
    """Returns the `batch_statistics` of a strategy, after checking that all workers agree.

    All workers must call this function.

    Args:
        group: the workers.
        given: the argument on this worker; None to use `TFDIST_BATCH_STATISTICS`.

    Raises:
        ProgramMismatchError: the workers' settings differ.
    """
    chosen = group.options.batch_statistics if given is None else given
    group.agree("batch_statistics", chosen)
    return chosen


class MirroredStrategy(tf.distribute.MirroredStrategy):  # type: ignore[misc]
    """Synchronous data parallelism over the devices of one process.

    Args:
        devices: the names of the devices. By default, all GPUs, or all logical CPU devices if
            there are no GPUs.
        cross_device_ops: a `tf.distribute.CrossDeviceOps` for reductions that are called outside of
            replicas. Reductions inside replicas are always collectives.
        communication: `"native"` for tfdist's collectives, which on GPUs need only NVIDIA's driver
            and use NCCL if available; `"tensorflow"` for TensorFlow's collectives; `"auto"`, the
            default, means `"tensorflow"`.
        batch_statistics: the rows that `BatchNormalization` layers compute statistics from during
            training. With `"global"`, these are the rows of the whole batch, as in one process.
            With `"replica"`, each replica uses its own rows, without communication. Layers with
            `synchronized=True` always use the whole batch. The default is the value of
            `TFDIST_BATCH_STATISTICS`, or `"global"` if this variable is not set.

    Raises:
        ValueError: `communication` or `batch_statistics` has an unknown value.
        NativeUnavailableError: the native collectives were requested and are unavailable.

    Example:
        ```python
        strategy = tfdist.MirroredStrategy(["GPU:0", "GPU:1"])
        ```
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: Any = None,
        *,
        communication: Literal["auto", "native", "tensorflow"] = "auto",
        batch_statistics: BatchStatistics | None = None,
    ) -> None:
        check_communication(communication)
        check_batch_statistics(batch_statistics)
        group = join(ResolvedJob())
        statistics = agreed_batch_statistics(group, batch_statistics)
        names = [_full_name(d) for d in devices] if devices else local_devices(group)
        native = communication == "native"
        if native:
            group = join_devices(names)
        options = tf.distribute.experimental.CommunicationOptions()
        workers = Alone()
        replicas = replica_communicators(group, names, workers, options, native=native)
        extended = ReplicatedExtended(self, names, replicas, workers, group, cross_device_ops)
        extended.batch_statistics = statistics
        tf.distribute.Strategy.__init__(self, extended)

    def explain(self, model: Any, batch: Any) -> Any:
        """Prints the values that a training step communicates, with their sizes and source lines.

        Args:
            model: a compiled Keras model, created in the scope of this strategy.
            batch: a global batch in the form that `train_step` receives, such as a pair of inputs
                and targets.

        Returns:
            A list of transfers, each with the attributes `kind` ("reduce" or "gather"),
            `operation`, `size` in bytes, `shape`, `where` and `reason`.

        Example:
            >>> strategy.explain(model, (x[:64], y[:64]))
            The step reduces 26.0 MiB and gathers 0 B: …
        """
        return extended_of(self).explain(model, batch)


def _full_name(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device if device.startswith("/") else f"/device:{device}")
    host = tf.DeviceSpec.from_string(tf.config.list_logical_devices("CPU")[0].name)
    return str(host.make_merged_spec(spec).to_string())
