"""The groups of workers that tests share, kept warm between tests."""

from tests.harness.ranks import Ranks

GROUPS = {
    "alone": Ranks(0),
    "1": Ranks(1),
    "2": Ranks(2),
    "2 by TensorFlow": Ranks(2, native=False),
    "2 hosts": Ranks(2, hosts=2),
    "3 on 2 hosts": Ranks(3, hosts=2),
    "4 on 2 hosts": Ranks(4, hosts=2),
    "4, the last on another host": Ranks(4, hosts=[0, 0, 0, 1]),
    "6 on 5 hosts": Ranks(6, hosts=[0, 1, 1, 2, 3, 4]),
    "3": Ranks(3),
    "4": Ranks(4),
    "1x2": Ranks(1, devices=2),
    "2x2": Ranks(2, devices=2),
    "2x2 on 2 hosts": Ranks(2, devices=2, hosts=2),
    "2 GPUs": Ranks(2, gpus=""),
    "2 GPUs by own kernels": Ranks(2, gpus="p2p"),
    "2 GPUs by NCCL": Ranks(2, gpus="nccl"),
    "2 GPUs through the host": Ranks(2, gpus="host"),
    "2 GPUs on 2 hosts": Ranks(2, hosts=2, gpus=""),
    "2 GPUs with TLS": Ranks(2, tls=True, gpus=""),
    "3 GPUs on 2 hosts by NCCL": Ranks(3, hosts=2, gpus="nccl"),
    "4 GPUs": Ranks(4, gpus=""),
    "4 GPUs through the host": Ranks(4, gpus="host"),
    "6 GPUs on 5 hosts by NCCL": Ranks(6, hosts=[0, 1, 1, 2, 3, 4], gpus="nccl"),
    "1x2 GPUs": Ranks(1, devices=2, gpus=""),
    "2x2 GPUs": Ranks(2, devices=2, gpus=""),
    "2x2 GPUs by NCCL": Ranks(2, devices=2, gpus="nccl"),
    "2x2 GPUs through the host": Ranks(2, devices=2, gpus="host"),
    "2x2 GPUs on 2 hosts": Ranks(2, devices=2, hosts=2, gpus=""),
}

# The tests of two workers with native collectives also run on these groups.
OTHER_GROUPS = ["2 by TensorFlow", "2x2", "3", "1x2", "4", "1"]
