"""`tfdist run`: runs a script as several workers, on this host or on several."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tfdist.cluster.auth.hmac_challenge import VARIABLE, new_secret
from tfdist.errors import LaunchError
from tfdist.exit_codes import PREEMPTED
from tfdist.launch.console import say
from tfdist.launch.elastic.job import run_elastic
from tfdist.launch.generations import Generations, Outcome
from tfdist.launch.hosts.client import join
from tfdist.launch.hosts.host_group import HostGroup
from tfdist.launch.hosts.host_info import HostInfo, worker_addresses
from tfdist.launch.hosts.rendezvous import Rendezvous
from tfdist.launch.hosts.server import serve
from tfdist.launch.job.cores import available_cores, thread_settings
from tfdist.launch.job.gpus import gpu_settings, visible_gpus
from tfdist.launch.job.log_routing import Output
from tfdist.launch.job.metrics import describe as describe_metrics
from tfdist.launch.job.plan import WorkerPlan, plan_workers
from tfdist.launch.job.ports import Reservation
from tfdist.launch.job.prebuild import prepare
from tfdist.launch.job.report import describe_history
from tfdist.launch.job.run_options import RunOptions, parse
from tfdist.launch.job.shutdown import Grace
from tfdist.launch.job.syntax import check_syntax
from tfdist.launch.job.watchdog import Watchdog
from tfdist.launch.ssh.run_on_hosts import run_on_hosts
from tfdist.options import Options

_LOOPBACK = "127.0.0.1"
_FLIGHT_DIR = "TFDIST_FLIGHT_DIR"


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: the command line, without `tfdist run`.

    Returns:
        0 if all workers succeeded, otherwise the exit code of the first that failed, or 128 plus
        the number of the signal that killed it or stopped this command; 75 if the workers were
        asked to stop and have saved their state.

    Raises:
        LaunchError: the workers could not be started.
        SystemExit: on a usage error (code 2), or after printing the help (code 0).
    """
    options = parse(arguments)
    if options.hosts:
        return run_on_hosts(options)
    gpus = visible_gpus(os.environ)
    count = options.workers or len(gpus) or 1
    per_worker, note = gpu_settings(gpus, count, options.gpus_per_worker)
    shared = thread_settings(available_cores(), count, options.cores_per_worker, os.environ)
    if options.metrics_port is not None:
        shared = {**shared, "TFDIST_METRICS_PORT": str(options.metrics_port)}
    if options.elastic:
        shared = {**shared, "TFDIST_ELASTIC": "1"}
    if options.workers is None and not gpus:
        say("starting one worker, as no GPUs are visible; -n N starts N")
    if note:
        say(note)
    if os.environ.get("TF_CONFIG"):
        say(
            "TF_CONFIG is already set and is replaced for the workers; if a scheduler set it, "
            "run the script directly, without tfdist run"
        )

    def plan(rendezvous: Rendezvous) -> tuple[WorkerPlan, ...]:
        return plan_workers(
            addresses=rendezvous.addresses,
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
    prepare()
    # Forked first, while this process has no descriptors that the watchdog must not inherit.
    watchdog = Watchdog()
    try:
        avoid = options.rendezvous[1] if options.rendezvous else None
        several = options.elastic and options.nnodes > 1
        with Reservation(count + several, avoid) as reservation:
            rendezvous = _rendezvous(options, reservation.ports[:count])
            if options.elastic:
                port = reservation.ports[count] if several else None
                return _supervise_elastic(options, rendezvous, plan, gpus, watchdog, port)
            return _supervise(options, rendezvous, plan(rendezvous), watchdog)
    finally:
        watchdog.close()


def _rendezvous(options: RunOptions, ports: tuple[int, ...]) -> Rendezvous:
    if options.nnodes == 1 or options.rendezvous is None:
        addresses = worker_addresses({0: (options.host or _LOOPBACK, ports)})
        secret = os.environ.get(VARIABLE, "") or new_secret()
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
    """A rendezvous for --dry-run: with ports that are free now, without contacting other hosts."""
    if options.nnodes == 1:
        with Reservation(count) as reservation:
            return _rendezvous(options, reservation.ports)
    say(f"the other hosts are not contacted: assuming {count} workers on each, without addresses")
    hosts = range(options.nnodes)
    addresses = tuple(f"HOST{host}:PORT{index}" for host in hosts for index in range(count))
    return Rendezvous(addresses, first=options.node_rank * count)


def _say_metrics(rendezvous: Rendezvous, plans: Sequence[WorkerPlan]) -> None:
    ranks = range(rendezvous.first, rendezvous.first + len(plans))
    settings = {**os.environ, **plans[0].settings}
    if metrics := describe_metrics(settings, rendezvous.addresses, ranks):
        say(metrics)


def _supervise_elastic(
    options: RunOptions,
    rendezvous: Rendezvous,
    plan: Callable[[Rendezvous], Sequence[WorkerPlan]],
    gpus: Sequence[str],
    watchdog: Watchdog,
    witness_port: int | None,
) -> int:
    _say_metrics(rendezvous, plan(rendezvous))

    def of(addresses: Sequence[str] | None) -> Sequence[WorkerPlan]:
        known = rendezvous.addresses if addresses is None else tuple(addresses)
        return plan(replace(rendezvous, addresses=known))

    environment = {**os.environ, VARIABLE: rendezvous.secret}
    return run_elastic(options, rendezvous, of, environment, gpus, watchdog, witness_port)


def _supervise(
    options: RunOptions, rendezvous: Rendezvous, plans: Sequence[WorkerPlan], watchdog: Watchdog
) -> int:
    _say_metrics(rendezvous, plans)
    output = Output(options.output, options.log_dir)
    hosts = HostGroup(options.node_rank, rendezvous.channels)
    flight_dir = os.environ.get(_FLIGHT_DIR)
    own_secret = bool(os.environ.get(VARIABLE))
    generations = Generations(
        plans=plans,
        # Not in the plan's settings, which --dry-run prints.
        environment={**os.environ, VARIABLE: rendezvous.secret},
        output=output,
        flight_dir=Path(flight_dir) if flight_dir else output.directory,
        hosts=hosts,
        host=options.node_rank,
        watchdog=watchdog,
        grace=Grace.given(options.grace),
        max_restarts=options.max_restarts,
        new_secret=None if own_secret else new_secret,
    )
    try:
        outcome = generations.run()
    except BaseException:
        if not generations.failures:
            output.remove()
        raise
    finally:
        hosts.close()
    output.show_rest()
    if outcome.saved or not outcome.failures or output.is_empty():
        output.remove()
    return _report(outcome)


def _report(outcome: Outcome) -> int:
    """Prints how the job has ended, unless its only failure has been shown; returns its code."""
    failures = outcome.failures
    if outcome.saved:
        say(
            f"The workers have saved their state, and the job ends with code {PREEMPTED}; "
            f"the same command continues it."
        )
        return PREEMPTED
    times = f"{len(failures)} {'time' if len(failures) == 1 else 'times'}"
    if outcome.succeeded:
        if failures:
            say(
                f"All workers have succeeded, after the job has failed {times}:\n"
                f"{describe_history(failures)}"
            )
        return 0
    reason = f" and is not started again: {outcome.reason}." if outcome.reason else "."
    if len(failures) > 1:
        say(f"The job has failed {times}{reason}\n{describe_history(failures)}")
    elif outcome.reason:
        say(f"The job is not started again: {outcome.reason}.")
    return failures[-1].code
