"""Trains torch models, in a pipeline with `torch.distributed.pipelining` or in one process."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.pipeline.backends import WHOLE
from benchmarks.pipeline.batch import WORKLOADS
from benchmarks.pipeline.torch_models import stage


def one(rank: int, ranks: int) -> list[int]:
    """Returns the index of the stage of a rank in a schedule with one stage on each rank."""
    return [rank]


def loop(rank: int, ranks: int) -> list[int]:
    """Returns the indices of the two stages of a rank in a schedule with a looped placement.

    A microbatch passes all ranks in order, and then all ranks in the same order again.
    """
    return [rank, rank + ranks]


def there_and_back(rank: int, ranks: int) -> list[int]:
    """Returns the indices of the two stages of a rank in a schedule with a V-shaped placement.

    A microbatch passes all ranks in order, and then all ranks in the reverse order.
    """
    return [rank, 2 * ranks - 1 - rank]


SCHEDULES = {
    "gpipe": (schedules.ScheduleGPipe, one),
    "1f1b": (schedules.Schedule1F1B, one),
    "interleaved": (schedules.ScheduleInterleaved1F1B, loop),
    "looped_bfs": (schedules.ScheduleLoopedBFS, loop),
    "interleaved_zb": (schedules.ScheduleInterleavedZeroBubble, loop),
    "zbv": (schedules.ScheduleZBVZeroBubble, there_and_back),
    "dualpipev": (schedules.ScheduleDualPipeV, there_and_back),
}


class Trainer:
    """Trains models with SGD. There is one model for each schedule and number of microbatches.

    Args:
        addresses: the addresses of the workers of the pipeline; empty for one process.
        rank: the rank of this worker.
        model: a key of `WORKLOADS`.
        pass_seconds: must be None, because this class does not support stages that wait.
    """

    def __init__(
        self, addresses: list[str], rank: int, model: str, pass_seconds: float | None
    ) -> None:
        assert pass_seconds is None
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._rank, self._ranks = rank, len(addresses)
        self._size = size = WORKLOADS[model]
        self._x, self._y = (
            torch.randint(size.vocabulary, (size.rows, size.length)) for _ in range(2)
        )
        if addresses:
            start = f"tcp://{addresses[0]}"
            dist.init_process_group("gloo", init_method=start, rank=rank, world_size=self._ranks)
        self._models: dict[tuple[str, int], Callable[[], None]] = {}

    def begin(self) -> None:
        """Does nothing. The answer to this request shows that the framework is imported."""

    def steps(self, schedule: str, microbatches: int, count: int) -> float:
        """Takes steps, and returns their total time in seconds."""
        key = (schedule, microbatches)
        if key not in self._models:
            make = self._whole if schedule == WHOLE else self._in_stages
            self._models[key] = make(schedule, microbatches)
        step = self._models[key]
        start = time.perf_counter()
        for _ in range(count):
            step()
        return time.perf_counter() - start

    def _whole(self, schedule: str, microbatches: int) -> Callable[[], None]:
        model = stage(self._size, 0, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            loss = cross_entropy(model(self._x), self._y)
            loss.backward()
            optimizer.step()
            float(loss)

        return step

    def _in_stages(self, schedule: str, microbatches: int) -> Callable[[], None]:
        make, placed = SCHEDULES[schedule]
        mine = placed(self._rank, self._ranks)
        count = self._ranks * len(mine)
        modules = [stage(self._size, index, count) for index in mine]
        stages = [
            PipelineStage(module, index, count, torch.device("cpu"))
            for module, index in zip(modules, mine, strict=True)
        ]
        several = issubclass(make, schedules.PipelineScheduleMulti)
        run = make(stages if several else stages[0], microbatches, loss_fn=cross_entropy)
        parameters = nn.ModuleList(modules).parameters()
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        last = count - 1 in mine

        def step() -> None:
            optimizer.zero_grad()
            losses: list[Tensor] | None = [] if last else None
            inputs = [self._x] if 0 in mine else []
            run.step(*inputs, target=self._y if last else None, losses=losses)
            optimizer.step()
            if losses:
                float(torch.stack(losses).mean())

        return step


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy over all characters of all rows."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
