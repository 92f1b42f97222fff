"""TF_CONFIG as tfdist understands it, and which of the other workers can be reached."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tfdist.cluster import Topology, check_own, from_environment
from tfdist.errors import ClusterError
from tfdist.launch.commands.doctor.probe import Answer, probe
from tfdist.launch.commands.doctor.section import Question, Section

_SECONDS = 5.0
_AT_ONCE = 32


def check(question: Question) -> Section:
    """Reads TF_CONFIG, claims the own address for a moment, and dials every other worker."""
    try:
        topology = from_environment(question.environment)
    except ClusterError as error:
        return Section([("TF_CONFIG", "wrong")], [str(error)])
    if not topology.workers:
        kind = "an evaluator, outside the group" if topology.task_type else "a process alone"
        value = "not set" if topology.task_type is None else "understood"
        return Section([("TF_CONFIG", value), ("this process", kind)])
    section = Section([("TF_CONFIG", "understood")])
    section.add("this process", f"rank {topology.rank} of {topology.size}: {topology.me}")
    section.add("chief", str(topology.chief))
    try:
        check_own(topology.me.address, name=str(topology.me))
        section.add("own address", "on this machine, and free")
    except ClusterError as error:
        section.add("own address", "cannot be used")
        section.problems.append(str(error))
    _dial(section, topology, _SECONDS if question.timeout is None else question.timeout)
    return section


def _dial(section: Section, topology: Topology, timeout: float) -> None:
    peers = [worker for worker in topology.workers if worker != topology.me]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda worker: probe(worker.address, timeout), peers)
        for worker, answer in zip(peers, answers, strict=True):
            section.add(str(worker), answer.value)
            if answer is Answer.UNRESOLVED:
                section.problems.append(
                    f"{worker}: its name does not resolve here: correct it in TF_CONFIG, or in "
                    f"this machine's name service"
                )
            elif answer is Answer.SILENT:
                section.problems.append(
                    f"{worker}: no answer within {timeout:g} s: see that the machine is on and "
                    f"that no firewall stands between"
                )
