"""The job that tfdist finds in the environment, and which of the other workers are reachable."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from tfdist._src.cluster import Found, Topology, check_own, find
from tfdist._src.cluster.auth.handshake import summary
from tfdist._src.cluster.resolvers.registry import RESOLVERS
from tfdist._src.launch.commands.doctor.probe import ProbeResult, probe
from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.options import Options
from tfdist.errors import ClusterError

_SECONDS = 5.0
_AT_ONCE = 32


def check(context: Context) -> Section:
    """Finds this process's job, briefly binds this worker's address, and dials every other worker.

    Where workers tell one another their addresses only when they meet, only rank 0's is tried.
    """
    section = Section([("looked for", ", ".join(RESOLVERS))])
    try:
        found = find(context.environment)
    except ClusterError as error:
        section.add("found", "a description of a job that is invalid")
        section.problems.append(str(error))
        return section
    section.add("found", found.engine or "nothing")
    topology = found.topology
    if not topology.workers:
        kind = "an evaluator, outside the group" if topology.task_type else "a single process"
        section.add("this process", kind)
        return section
    section.add("this process", f"rank {topology.rank} of {topology.size}: {topology.me}")
    section.add("chief", str(topology.chief))
    if found.exchange is not None:
        where = found.exchange.meeting or "an address that rank 0 chooses, and its launcher tells"
        section.add("addresses", f"the workers tell theirs to rank 0, at {where}")
    _check_authentication(section, found, context)
    if topology.me.address:
        try:
            check_own(topology.me.address, name=str(topology.me))
            section.add("own address", "on this host, and free")
        except ClusterError as error:
            section.add("own address", "unusable")
            section.problems.append(str(error))
    _dial(section, topology, _SECONDS if context.timeout is None else context.timeout)
    return section


def _check_authentication(section: Section, found: Found, context: Context) -> None:
    with contextlib.suppress(ValueError):  # `settings` reports which
        options = Options.from_environment(dict(context.environment))
        text = summary(found.topology, options)
        if found.exchange is not None and not (options.secret or options.tls):
            if found.exchange.share is not None:
                text = "a secret that rank 0 makes, and its launcher tells"
            elif found.exchange.seals:
                text = "a secret that rank 0 makes, sealed by MUNGE"
        section.add("authentication", text)


def _dial(section: Section, topology: Topology, timeout: float) -> None:
    peers = [one for one in topology.workers if one.address and one != topology.me]
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
