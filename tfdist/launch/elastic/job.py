"""An elastic job on this host, from its settings to its exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfdist.cluster.membership.witness import Witness
from tfdist.errors import TfdistError
from tfdist.exit_codes import PREEMPTED
from tfdist.launch.console import announce, say
from tfdist.launch.elastic.outcome import ElasticOutcome
from tfdist.launch.elastic.paused_workers import PausedWorkers
from tfdist.launch.elastic.report import describe_end
from tfdist.launch.elastic.spares import Spares
from tfdist.launch.elastic.supervisor import ElasticSupervisor
from tfdist.launch.hosts.elastic_hosts import ElasticHosts
from tfdist.launch.hosts.rendezvous import Rendezvous
from tfdist.launch.job.gpus import VISIBLE
from tfdist.launch.job.log_routing import Output
from tfdist.launch.job.losses import decisive
from tfdist.launch.job.plan import WorkerPlan
from tfdist.launch.job.report import describe
from tfdist.launch.job.run_options import RunOptions
from tfdist.launch.job.shutdown import Grace
from tfdist.launch.job.watchdog import Watchdog
from tfdist.options import Options

_GENERATION = "TFDIST_GENERATION"
_FLIGHT_DIR = "TFDIST_FLIGHT_DIR"
_WITNESS = "TFDIST_WITNESS"
# Set for each worker alone.
_OWN = frozenset({"TF_CONFIG"})


def spare_settings(
    plans: Sequence[WorkerPlan], gpus: Sequence[str]
) -> tuple[dict[str, str] | None, str]:
    """The settings with which a spare can become any of this host's workers.

    Variables that TensorFlow reads when it is imported cannot be changed afterwards.

    Args:
        plans: the workers.
        gpus: the GPUs that this host's workers may use.

    Returns:
        The settings, None if there can be no spare; and why not, in one line.

    Example:
        >>> plan = WorkerPlan(0, ("python", "-u", "train.py"), {"TF_CONFIG": "{}", "A": "1"})
        >>> spare_settings([plan], gpus=[])
        ({'A': '1'}, '')
    """
    shared = [{k: v for k, v in plan.settings.items() if k not in _OWN} for plan in plans]
    on_gpus = gpus and any(settings.get(VISIBLE, "all") for settings in shared)
    if on_gpus or any(settings != shared[0] for settings in shared):
        return None, (
            "no warm spares: each worker has GPUs of its own, chosen when TensorFlow is imported; "
            "a replacement takes seconds more to start"
        )
    return shared[0], ""


def run_elastic(
    options: RunOptions,
    rendezvous: Rendezvous,
    plan: Callable[[Sequence[str] | None], Sequence[WorkerPlan]],
    environment: Mapping[str, str],
    gpus: Sequence[str],
    watchdog: Watchdog,
    witness_port: int | None,
) -> int:
    """Runs the workers of this host, and says how the job has ended.

    Args:
        options: those of the command.
        rendezvous: what the hosts have agreed on.
        plan: makes the plans of this host's workers from the addresses of all; None for those of
            the rendezvous.
        environment: the environment that the workers inherit, with the job's secret.
        gpus: the GPUs that this host's workers may use.
        watchdog: kills the workers if this process dies.
        witness_port: a reserved port, at which the workers of other hosts ask whether one of this
            host is dead; None for a job on one host.

    Raises:
        LaunchError: a worker cannot be started at the beginning.
    """
    try:
        silences = Options.from_environment(dict(environment))
    except ValueError:  # The workers say what is wrong.
        silences = Options()
    output = Output(options.output, options.log_dir)
    flight_dir = environment.get(_FLIGHT_DIR) or str(output.directory)
    environment = {**environment, _GENERATION: "0", _FLIGHT_DIR: flight_dir}
    witness = None
    if witness_port is not None:
        witness = _witness(rendezvous, witness_port, environment)
    if witness is not None:
        environment[_WITNESS] = witness.address
    settings, problem = spare_settings(plan(None), gpus) if options.spares else (None, "")
    if problem:
        say(problem)
    spares = Spares(
        options.spares if settings is not None else 0,
        options.command[2:],
        {**environment, **(settings or {})},
        watchdog,
    )
    hosts = ElasticHosts(
        options.node_rank, rendezvous.channels, rendezvous.late_hosts, witness, options.nnodes
    )
    try:
        outcome = ElasticSupervisor(
            plan=plan,
            environment=environment,
            output=output,
            hosts=hosts,
            host=options.node_rank,
            watchdog=watchdog,
            grace=Grace.given(options.grace),
            limit=options.max_restarts,
            spares=spares,
            paused=PausedWorkers(max(silences.heartbeat_timeout, silences.link_timeout)),
            joining=rendezvous.running,
        ).run()
    except BaseException:
        output.remove()
        raise
    finally:
        hosts.close()
    output.show_rest()
    _report(outcome, options.node_rank, output, Path(flight_dir))
    if output.is_empty() or (outcome.code in (0, PREEMPTED) and not outcome.losses):
        output.remove()
    return outcome.code


def _witness(rendezvous: Rendezvous, port: int, environment: Mapping[str, str]) -> Witness | None:
    """What tells other hosts of deaths on this one."""
    host, _, _ = rendezvous.addresses[rendezvous.first].rpartition(":")
    try:
        return Witness(f"{host}:{port}", Options.from_environment(dict(environment)), announce)
    except (TfdistError, OSError, ValueError) as error:
        say(f"other hosts cannot be told which workers of this one are dead: {error}")
        return None


def _report(outcome: ElasticOutcome, host: int, output: Output, flight_dir: Path) -> None:
    job = outcome.job
    failure = decisive(outcome.losses, completed=bool(job.completed), left=bool(job.left))
    if outcome.stopped is not None:
        failure = None
        if outcome.code != PREEMPTED:
            say(str(outcome.stopped), below_output=True)
    if failure is not None:
        say(describe(failure, host, output.written()), below_output=True)
    if text := describe_end(outcome.losses, job, outcome.code):
        say(text)
    if outcome.losses and any(flight_dir.glob("flight-*.json")):
        say(f"What each worker was doing: tfdist doctor --flight {flight_dir}")
