"""`tfdist run`: starts a script as several workers, on this machine or on several."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tfdist.cluster.auth.hmac_challenge import VARIABLE, new_secret
from tfdist.errors import LaunchError
from tfdist.launch.console import say
from tfdist.launch.hosts.client import join
from tfdist.launch.hosts.host_group import HostGroup
from tfdist.launch.hosts.host_info import HostInfo, worker_addresses
from tfdist.launch.hosts.rendezvous import Rendezvous
from tfdist.launch.hosts.server import gather
from tfdist.launch.job.cores import available_cores, thread_settings
from tfdist.launch.job.gpus import gpu_settings, visible_gpus
from tfdist.launch.job.log_routing import Output
from tfdist.launch.job.plan import WorkerPlan, plan_workers
from tfdist.launch.job.ports import Reservation
from tfdist.launch.job.prebuild import prepare
from tfdist.launch.job.report import describe
from tfdist.launch.job.run_options import RunOptions, parse
from tfdist.launch.job.watchdog import Watchdog
from tfdist.launch.supervisor import Supervisor
from tfdist.options import Options

_ALONE = "127.0.0.1"


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: the command line, without `tfdist run`.

    Returns:
        0 if all workers ended well, otherwise the exit code of the first that did not, or 128
        plus the number of the signal that killed it or stopped this command.

    Raises:
        LaunchError: the workers could not be started.
        SystemExit: the command line is wrong (code 2), or asks for help (code 0).
    """
    options = parse(arguments)
    gpus = visible_gpus(os.environ)
    count = options.workers or len(gpus) or 1
    own, note = gpu_settings(gpus, count, options.gpus_per_worker)
    shared = thread_settings(available_cores(), count, options.cores_per_worker, os.environ)
    if note:
        say(note)
    if os.environ.get("TF_CONFIG"):
        say(
            "TF_CONFIG is set here and is replaced for the workers; where a scheduler sets it, "
            "start the script itself, without tfdist run"
        )

    def plan(meeting: Rendezvous) -> tuple[WorkerPlan, ...]:
        return plan_workers(
            addresses=meeting.addresses,
            first=meeting.first,
            command=options.command,
            shared=shared,
            own=own,
        )

    if options.dry_run:
        for worker in plan(_supposed_meeting(options, count)):
            print(worker)
        return 0
    prepare()
    # Forked first, while this process has nothing that the watchdog should not hold.
    watchdog = Watchdog()
    try:
        avoid = options.rendezvous[1] if options.rendezvous else None
        with Reservation(count, avoid) as reservation:
            meeting = _meet(options, reservation.ports)
            return _supervise(options, meeting, plan(meeting), watchdog)
    finally:
        watchdog.close()


def _meet(options: RunOptions, ports: tuple[int, ...]) -> Rendezvous:
    secret = os.environ.get(VARIABLE, "")
    if options.nnodes == 1 or options.rendezvous is None:
        addresses = worker_addresses({0: (options.host or _ALONE, ports)})
        return Rendezvous(tuple(addresses), first=0, secret=secret or new_secret())
    try:
        timeout = Options.from_environment().start_timeout
    except ValueError as error:
        raise LaunchError(str(error)) from error
    mine = HostInfo(options.node_rank, options.nnodes, options.host or "", ports)
    meet = gather if options.node_rank == 0 else join
    return meet(options.rendezvous, mine, timeout, secret)


def _supposed_meeting(options: RunOptions, count: int) -> Rendezvous:
    """What the workers would be told, with ports that are free now; nobody is called."""
    if options.nnodes == 1:
        with Reservation(count) as reservation:
            return _meet(options, reservation.ports)
    say(f"the other nodes are not asked: each is shown with {count} workers, without addresses")
    nodes = range(options.nnodes)
    addresses = tuple(f"NODE{node}:PORT{index}" for node in nodes for index in range(count))
    return Rendezvous(addresses, first=options.node_rank * count)


def _supervise(
    options: RunOptions, meeting: Rendezvous, plans: Sequence[WorkerPlan], watchdog: Watchdog
) -> int:
    output = Output(options.output, options.log_dir)
    team = HostGroup(options.node_rank, meeting.links)
    try:
        failure = Supervisor(
            plans=plans,
            # Not among the plan's settings, which --dry-run prints.
            environment={**os.environ, VARIABLE: meeting.secret},
            output=output,
            team=team,
            node=options.node_rank,
            watchdog=watchdog,
            grace=options.grace,
        ).run()
    except BaseException:
        output.remove()
        raise
    finally:
        team.close()
    folder = output.written()
    if failure is None or folder is None:
        output.remove()
    if failure is None:
        return 0
    say(describe(failure, options.node_rank, folder), below_output=True)
    return failure.code
