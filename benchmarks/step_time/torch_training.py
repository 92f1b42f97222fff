"""Trains the torch models.

Each function in `TRAINING` takes steps, and calls `clock.tick` after each step. It never returns.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.step_time.clock import Clock
from benchmarks.step_time.models import OPTIMIZERS, Workload
from benchmarks.step_time.torch_models import BUILDERS


def alone(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains without communication."""
    torch.set_num_threads(1)
    train(BUILDERS[workload.name](), workload, clock)


def ddp(workload: Workload, rank: int, addresses: list[str], clock: Clock) -> None:
    """Trains with `DistributedDataParallel` and its default arguments, over gloo."""
    torch.set_num_threads(1)
    if addresses:
        start = f"tcp://{addresses[0]}"
        dist.init_process_group("gloo", init_method=start, rank=rank, world_size=len(addresses))
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(BUILDERS[workload.name]())
    train(model, workload, clock)


def train(model: nn.Module, workload: Workload, clock: Clock) -> None:
    """Runs a training loop that computes the loss and the accuracy, like Keras's `fit`."""
    x, y = data(workload)
    optimizer = CLASSES[workload.optimizer](model.parameters(), lr=OPTIMIZERS[workload.optimizer])
    loss_function = nn.CrossEntropyLoss()
    correct = torch.zeros(())
    while True:
        optimizer.zero_grad()
        logits = model(x).flatten(0, -2)
        loss = loss_function(logits, y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            correct += (logits.argmax(-1) == y).sum()
        clock.tick(loss.detach())


def data(workload: Workload) -> tuple[Tensor, Tensor]:
    """Returns a random batch of one worker: its rows, and its labels as a one-dimensional tensor.

    Images have the channels first, as torch expects.
    """
    torch.manual_seed(0)
    rows, shape = workload.rows, workload.shape
    if workload.integers:
        x = torch.randint(workload.classes, (rows, *shape))
    else:
        x = torch.randn(rows, *(shape[-1:] + shape[:-1]))
    return x, torch.randint(workload.classes, (rows, *workload.labels)).flatten()


CLASSES = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
TRAINING = {"ddp": ddp, "ddp_unconnected": alone}
