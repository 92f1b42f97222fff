"""The script that the workers run under torchrun, for the backend `torchrun`.

As in PyTorch's tutorial on fault-tolerant training with torchrun, rank 0 saves the model from time
to time. In contrast to the tutorial, rank 0 also saves the state of the optimizer, and replaces the
file atomically.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

from benchmarks.recovery.cases import Order
from benchmarks.recovery.marks import FAILED, STEP, Notes
from benchmarks.recovery.sizes import CLASSES, HIDDEN, ROWS, SHAPES


def main(order: Order, notes: Notes) -> None:
    """Trains until the driver kills the process.

    Args:
        order: the model, the timeout, and the folders.
        notes: the notes in which the worker records the end of each step.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    # When torchrun of torch 2.13 restarts the workers, it keeps the store with its keys. Without a
    # new prefix, gloo would find the addresses of the previous processes in the store.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(
        os.environ["TORCHELASTIC_RESTART_COUNT"], dist.TCPStore(address, port, is_master=False)
    )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    # Only the steps use this group, so the short timeout does not apply to the start. At the start,
    # the workers use the default group, which has a longer timeout.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=order.silence))
    width, layers = SHAPES[order.model][0], []
    for _ in range(HIDDEN[order.model]):
        layers += [nn.Linear(width, 256), nn.ReLU()]
        width = 256
    network = nn.Sequential(*layers, nn.Linear(width, CLASSES))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.001)
    steps, file = 0, Path(order.saved) / "snapshot.pt"
    if file.exists():
        snapshot = torch.load(file)
        network.load_state_dict(snapshot["MODEL_STATE"])
        optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        steps = snapshot["STEPS_RUN"]
    model = nn.parallel.DistributedDataParallel(network, process_group=group)
    loss_function = nn.CrossEntropyLoss()
    x = torch.randn(ROWS[order.model], *SHAPES[order.model])
    y = torch.randint(CLASSES, (ROWS[order.model],))
    correct = torch.zeros(())
    while True:
        optimizer.zero_grad()
        logits = model(x)
        loss = loss_function(logits, y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            correct += (logits.argmax(-1) == y).sum()
        loss.item()
        steps += 1
        notes.write(STEP, steps)
        if rank == 0 and steps % order.save_every == 0:
            part = file.with_suffix(".part")
            torch.save(
                {
                    "MODEL_STATE": model.module.state_dict(),
                    "OPTIMIZER_STATE": optimizer.state_dict(),
                    "STEPS_RUN": steps,
                },
                part,
            )
            part.replace(file)


if __name__ == "__main__":
    told = Order(**json.loads(sys.argv[1]))
    # This records the start of the worker. It must precede the imports of the frameworks, because
    # they are part of the time of a restart.
    mine = Notes(told.notes, int(os.environ["RANK"]))
    try:
        main(told, mine)
    except BaseException:
        mine.write(FAILED)
        raise
