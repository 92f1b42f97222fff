"""How the GPUs of this host read each other's memory, as a matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tfdist._src.launch.commands.doctor.section import Section
from tfdist._src.native.gpu_links import Copy, Link

_WIDTH = 8
_SHOWN = 4  # pairs in a problem
_PROBLEMS = {
    Copy.WRONG: "{pairs}: what is copied from the second GPU does not arrive as it was: turn off "
    "PCIe access control (ACS) and the IOMMU in the BIOS, or set NCCL_P2P_DISABLE=1",
    Copy.STUCK: "{pairs}: a copy from the second GPU does not end: the link is broken, and the "
    "kernel's log may say why (dmesg | grep Xid); CUDA_VISIBLE_DEVICES can leave a GPU out",
    Copy.FAILED: "{pairs}: no copy from the second GPU ({error}): see nvidia-smi, or try a "
    "longer --timeout",
}


def add(section: Section, links: Sequence[Link]) -> None:
    """Adds the matrix, what the driver says of the links, and the problems; nothing for one GPU."""
    if not links:
        return
    gpus = sorted({link.reader for link in links})
    by_pair = {(link.reader, link.owner): link for link in links}
    section.add("copies", "GB/s at which the GPU of a row reads the memory of a column's")
    section.add("", "".join(f"{gpu:>{_WIDTH}}" for gpu in gpus))
    for reader in gpus:
        cells = ("-" if reader == owner else _cell(by_pair[reader, owner]) for owner in gpus)
        section.add(f"{reader:>14}", "".join(f"{cell:>{_WIDTH}}" for cell in cells))
    if any(link.copy is Copy.INTACT and not link.direct for link in links):
        section.add("", "(in parentheses: through the host's memory)")
    if any(link.copy is Copy.TAKEN for link in links):
        section.add("", "(taken: not tried, since another process uses the GPU)")
    _add_kinds(section, links)
    _add_problems(section, links)


def obstacle(links: Sequence[Link]) -> str:
    """Why not all GPUs read each other's memory, which tfdist's kernels do; "" if they do."""
    for link in links:
        pair = f"GPU {link.reader}", f"GPU {link.owner}'s memory"
        if link.copy is Copy.WRONG:
            return "{} does not read what is in {}".format(*pair)
        if link.copy in (Copy.STUCK, Copy.FAILED):
            return "{} cannot read {}".format(*pair)
        if not link.direct:
            return "{} does not reach {}".format(*pair)
    return ""


def _cell(link: Link) -> str:
    if link.copy is not Copy.INTACT:
        return str(link.copy.value)
    speed = f"{link.speed / 1e9:.0f}" if link.speed >= 1e10 else f"{link.speed / 1e9:.1f}"
    return speed if link.direct else f"({speed})"


def _add_kinds(section: Section, links: Sequence[Link]) -> None:
    kinds: dict[str, list[Link]] = defaultdict(list)
    for link in links:
        if link.rank is not None and link.direct:
            atomics = "atomics, as over NVLink" if link.atomics else "no atomics, as over PCIe"
            kinds[f"{atomics}; the driver's rank {link.rank}"].append(link)
    for number, (kind, found) in enumerate(sorted(kinds.items())):
        pairs = "all" if len(found) == len(links) else _pairs(found)
        section.add("" if number else "links", f"{pairs}: {kind}")


def _add_problems(section: Section, links: Sequence[Link]) -> None:
    for copy, text in _PROBLEMS.items():
        if found := [link for link in links if link.copy is copy]:
            problem = text.format(pairs=f"GPUs {_pairs(found)}", error=found[0].error)
            section.problems.append(problem)


def _pairs(links: Sequence[Link]) -> str:
    shown = ", ".join(f"{link.reader}-{link.owner}" for link in links[:_SHOWN])
    more = len(links) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
