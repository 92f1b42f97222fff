"""TF_CONFIG as parsed by tfdist, and which of the other workers are reachable."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from tfdist.cluster import Topology, check_own, from_environment
from tfdist.cluster.auth.trust import summary
from tfdist.errors import ClusterError
from tfdist.launch.commands.doctor.probe import ProbeResult, probe
from tfdist.launch.commands.doctor.section import Context, Section
from tfdist.options import Options

_SECONDS = 5.0
_AT_ONCE = 32


def check(context: Context) -> Section:
    """Parses TF_CONFIG, briefly binds this worker's address, and dials every other worker."""
    try:
        topology = from_environment(context.environment)
    except ClusterError as error:
        return Section([("TF_CONFIG", "invalid")], [str(error)])
    if not topology.workers:
        kind = "an evaluator, outside the group" if topology.task_type else "a single process"
        value = "not set" if topology.task_type is None else "valid"
        return Section([("TF_CONFIG", value), ("this process", kind)])
    section = Section([("TF_CONFIG", "valid")])
    section.add("this process", f"rank {topology.rank} of {topology.size}: {topology.me}")
    section.add("chief", str(topology.chief))
    with contextlib.suppress(ValueError):  # `settings` reports which
        options = Options.from_environment(dict(context.environment))
        section.add("authentication", summary(topology, options))
    try:
        check_own(topology.me.address, name=str(topology.me))
        section.add("own address", "on this host, and free")
    except ClusterError as error:
        section.add("own address", "unusable")
        section.problems.append(str(error))
    _dial(section, topology, _SECONDS if context.timeout is None else context.timeout)
    return section


def _dial(section: Section, topology: Topology, timeout: float) -> None:
    peers = [worker for worker in topology.workers if worker != topology.me]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        results = pool.map(lambda worker: probe(worker.address, timeout), peers)
        for worker, result in zip(peers, results, strict=True):
            section.add(str(worker), result.value)
            if result is ProbeResult.UNRESOLVED:
                section.problems.append(
                    f"{worker}: its name does not resolve here: correct it in TF_CONFIG, or in "
                    f"this host's DNS"
                )
            elif result is ProbeResult.SILENT:
                section.problems.append(
                    f"{worker}: no answer within {timeout:g} s: check that its host is up and "
                    f"that no firewall is in between"
                )
