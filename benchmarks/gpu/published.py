"""Figures that others have published for their machines. This benchmark does not measure them."""

from __future__ import annotations

_NCCL = "https://github.com/NVIDIA/nccl-tests/issues/212"
_HOROVOD = "https://github.com/horovod/horovod/blob/master/docs/benchmarks.rst"
PUBLISHED = (
    {
        "what": "bus bandwidth of NCCL by rings, 8 H100 with NVLink",
        "value": "370 GB/s",
        "source": _NCCL,
    },
    {
        "what": "bus bandwidth of NCCL's all-reduce by NVLink SHARP, more than 256 MiB, 8 H100",
        "value": "480 GB/s",
        "source": _NCCL,
    },
    {
        "what": "scaling efficiency of Horovod, ResNet-101, 512 Pascal GPUs, RoCE at 25 Gbit/s",
        "value": "90 %",
        "source": _HOROVOD,
    },
)


def show() -> None:
    """Prints each published figure and its source."""
    print("\nPublished by others, on other machines, not measured here:")
    for each in PUBLISHED:
        print(f"  {each['value']:>10}  {each['what']}\n{'':14}{each['source']}")
