"""`tfdist run`: runs a script as several workers, on this host or on several."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tfdist._src import native
from tfdist._src.cluster.auth.handshake import new_secret
from tfdist._src.cluster.cluster_spec import port_of
from tfdist._src.cluster.membership.liveness import LivenessServer
from tfdist._src.launch.console import logger, warn
from tfdist._src.launch.hosts.newcomers import HostInfo, worker_addresses
from tfdist._src.launch.hosts.rendezvous import OtherHosts, Rendezvous, join, serve
from tfdist._src.launch.job import resources
from tfdist._src.launch.job.log_routing import Output
from tfdist._src.launch.job.ports import Reservation
from tfdist._src.launch.job.run_options import RunOptions, check_syntax, parse
from tfdist._src.launch.job.shutdown import Grace
from tfdist._src.launch.job.spares import Spares, spare_settings
from tfdist._src.launch.job.worker import Watchdog, WorkerPlan, plan_workers
from tfdist._src.launch.restart_all import RestartAll
from tfdist._src.launch.restart_one import RestartOne
from tfdist._src.launch.restart_policy import RestartPolicy
from tfdist._src.launch.ssh import run_on_hosts
from tfdist._src.launch.supervisor import Supervisor
from tfdist._src.options import (
    PREEMPTED,
    InternalVariable,
    NativeOptions,
    Options,
    Variable,
    log_level,
)
from tfdist.errors import LaunchError, NativeUnavailableError, TfdistError

_LOOPBACK = "127.0.0.1"


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: the command line, without `tfdist run`.

    Returns:
        The exit code: 0 if all workers succeeded, or 75 if the workers were asked to stop and have
        saved their state. Otherwise, it is the exit code of the first worker that failed. If a
        signal killed this worker or stopped this command, the exit code is 128 plus the number of
        the signal.

    Raises:
        LaunchError: the workers could not be started.
        SystemExit: on a usage error (code 2), or after printing the help (code 0).
    """
    options = parse(arguments)
    try:
        log_level()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if options.hosts:
        return run_on_hosts(options)
    gpus = resources.visible_gpus(os.environ)
    count = options.workers or len(gpus) or 1
    per_worker, note = resources.gpu_settings(gpus, count, options.gpus_per_worker)
    shared = resources.thread_settings(
        resources.available_cores(), count, options.cores_per_worker, os.environ
    )
    if options.metrics_port is not None:
        shared = {**shared, Variable.METRICS_PORT: str(options.metrics_port)}
    if options.elastic:
        shared = {**shared, InternalVariable.ELASTIC: "1"}
    if options.workers is None and not gpus:
        logger.info("starting one worker, as no GPUs are visible; -n N starts N")
    if note:
        logger.warning(note)
    if os.environ.get("TF_CONFIG"):
        logger.warning(
            "TF_CONFIG is already set and is replaced for the workers; if a scheduler set it, "
            "run the script directly, without tfdist run"
        )

    def plan(rendezvous: Rendezvous, addresses: Sequence[str] = ()) -> tuple[WorkerPlan, ...]:
        return plan_workers(
            addresses=addresses or rendezvous.addresses,
            first=rendezvous.first,
            command=options.command,
            shared=shared,
            per_worker=per_worker,
        )

    if options.dry_run:
        for worker in plan(_dry_run_rendezvous(options, count)):
            print(worker)
        return 0
    check_syntax(options.command)
    _build_native()
    # The watchdog is a fork of this process. It is started first, so that it does not inherit the
    # file descriptors that this process opens later.
    watchdog = Watchdog()
    try:
        avoid = options.rendezvous[1] if options.rendezvous else None
        several = options.elastic and options.nnodes > 1
        with Reservation(count + several, avoid) as reservation:
            rendezvous = _rendezvous(options, reservation.ports[:count])
            witness_port = reservation.ports[count] if several else None
            planned = partial(plan, rendezvous)
            return _supervise(options, rendezvous, planned, gpus, watchdog, witness_port)
    finally:
        watchdog.close()


def _rendezvous(options: RunOptions, ports: tuple[int, ...]) -> Rendezvous:
    if options.nnodes == 1 or options.rendezvous is None:
        addresses = worker_addresses({0: (options.host or _LOOPBACK, ports)})
        secret = os.environ.get(Variable.SECRET, "") or new_secret()
        return Rendezvous(tuple(addresses), first=0, secret=secret)
    try:
        settings = Options.from_environment()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    address = options.host or ""
    this_host = HostInfo(options.node_rank, options.nnodes, address, ports, elastic=options.elastic)
    meet = serve if options.node_rank == 0 else join
    return meet(options.rendezvous, this_host, settings)


def _dry_run_rendezvous(options: RunOptions, count: int) -> Rendezvous:
    """Returns the rendezvous that `--dry-run` shows, without contacting the other hosts.

    For a job on this host only, the ports are ports that are free now. For a job on several hosts,
    the addresses are placeholders such as `HOST1:PORT0`.
    """
    if options.nnodes == 1:
        with Reservation(count) as reservation:
            return _rendezvous(options, reservation.ports)
    logger.info(
        f"the other hosts are not contacted: assuming {count} workers on each, without addresses"
    )
    hosts = range(options.nnodes)
    addresses = tuple(f"HOST{host}:PORT{index}" for host in hosts for index in range(count))
    return Rendezvous(addresses, first=options.node_rank * count)


def _build_native() -> None:
    """Compiles the native collectives, unless they are disabled or already compiled.

    The launcher compiles them so that its workers do not all have to do so. If the compilation
    fails, the launcher only logs a warning, because the workers can use TensorFlow's collectives.
    """
    try:
        options = NativeOptions.from_environment()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if not options.enabled:
        return
    try:
        native.ensure(options)
    except NativeUnavailableError as error:
        logger.warning(f"warning: {error}")


def _print_metrics(rendezvous: Rendezvous, plans: Sequence[WorkerPlan]) -> None:
    settings = {**os.environ, **plans[0].settings}
    if line := describe_metrics(settings, rendezvous.addresses, [plan.rank for plan in plans]):
        logger.info(line)


def describe_metrics(
    environment: Mapping[str, str], addresses: Sequence[str], ranks: Sequence[int]
) -> str:
    """Describes where the workers serve their metrics; "" if they serve none.

    Args:
        environment: the environment variables of the workers.
        addresses: `"host:port"` of every worker of the job, in rank order.
        ranks: the ranks of this host's workers.

    Example:
        >>> describe_metrics({"TFDIST_METRICS_PORT": "9400"}, ["a:1", "a:2"], [0, 1])
        'metrics on 127.0.0.1, ports 9400 (worker 0) to 9401 (worker 1)'
    """
    try:
        options = Options.from_environment(dict(environment))
    except ValueError:  # The workers report which environment variable is invalid.
        return ""
    if not options.metrics_port:
        return ""
    first, last = (port_of(options.metrics_port, addresses, rank) for rank in (ranks[0], ranks[-1]))
    if len(ranks) == 1:
        return f"metrics on {options.metrics_host}, port {first} (worker {ranks[0]})"
    ports = f"ports {first} (worker {ranks[0]}) to {last} (worker {ranks[-1]})"
    return f"metrics on {options.metrics_host}, {ports}"


def _supervise(
    options: RunOptions,
    rendezvous: Rendezvous,
    plan: Callable[..., Sequence[WorkerPlan]],
    gpus: Sequence[str],
    watchdog: Watchdog,
    witness_port: int | None,
) -> int:
    """Runs the workers of this host, and prints how the job has ended.

    Args:
        options: the options of the command.
        rendezvous: the result of the hosts' rendezvous.
        plan: a function that returns the plans of this host's workers. Its argument is the sequence
            of the addresses of all workers; by default, the addresses in `rendezvous`.
        gpus: the GPUs that this host's workers may use.
        watchdog: kills the workers if this process dies.
        witness_port: a reserved port on which this process listens. The workers of other hosts
            connect to it to ask whether a worker of this host is dead. None if the job is not
            elastic or has no other hosts.

    Returns:
        The exit code of the command.
    """
    plans = plan()
    _print_metrics(rendezvous, plans)
    output = Output(options.output, options.log_dir)
    flight_dir = Path(os.environ.get(Variable.FLIGHT_DIR) or output.directory)
    # The secret is not in the settings of the plans, because --dry-run prints these settings.
    environment = {**os.environ, Variable.SECRET: rendezvous.secret}
    witness = None
    if witness_port is not None:
        witness = _witness(rendezvous, witness_port, environment)
    if witness is not None:
        environment[InternalVariable.WITNESS] = witness.address
    settings, problem = spare_settings(plans, gpus) if options.spares else (None, "")
    if problem:
        logger.warning(problem)
    spares = Spares(
        options.spares if settings is not None else 0,
        options.command[2:],
        {**environment, **(settings or {})},
        watchdog,
    )
    hosts = OtherHosts(rendezvous.channels, rendezvous.late_hosts, witness)
    policy = _policy(options, rendezvous, [worker.rank for worker in plans])
    try:
        end = Supervisor(
            policy=policy,
            plan=plan,
            environment=environment,
            output=output,
            flight_dir=flight_dir,
            hosts=hosts,
            host=options.node_rank,
            watchdog=watchdog,
            spares=spares,
        ).run()
    except BaseException:
        if not policy.has_failed:
            output.remove()
        raise
    finally:
        hosts.close()
    output.show_rest()
    if end.summary:
        failed = end.code not in (0, PREEMPTED)
        logger.log(logging.ERROR if failed else logging.INFO, end.summary)
    if output.is_empty() or (end.code in (0, PREEMPTED) and not policy.has_failed):
        output.remove()
    return end.code


def _policy(options: RunOptions, rendezvous: Rendezvous, ranks: Sequence[int]) -> RestartPolicy:
    place = (ranks, options.node_rank, rendezvous.channels, Grace.given(options.grace))
    limit, now = options.max_restarts, time.monotonic()
    if not options.elastic:
        secret = None if os.environ.get(Variable.SECRET) else new_secret
        return RestartAll(*place, limit=limit, now=now, new_secret=secret)
    try:
        timeouts = Options.from_environment()
    except ValueError:  # The workers report which environment variable is invalid.
        timeouts = Options()
    return RestartOne(
        *place,
        limit=limit,
        now=now,
        silence=timeouts.heartbeat_timeout,
        num_hosts=options.nnodes,
        joining=rendezvous.running,
    )


def _witness(
    rendezvous: Rendezvous, port: int, environment: Mapping[str, str]
) -> LivenessServer | None:
    """Starts the service that tells the workers of other hosts which workers of this host are dead.

    Returns:
        The service; None if it cannot be started. The job can run without the service.
    """
    host, _, _ = rendezvous.addresses[rendezvous.first].rpartition(":")
    try:
        return LivenessServer(f"{host}:{port}", Options.from_environment(dict(environment)), warn)
    except (TfdistError, OSError, ValueError) as error:
        logger.warning(f"other hosts will not learn which workers of this host are dead: {error}")
        return None
