"""Doctor's checks of a job's workers, TLS and metrics, and its reports about jobs."""

import contextlib
import enum
import importlib.util
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tfdist._src.cluster import ResolvedJob, Topology, check_own, find, from_environment
from tfdist._src.cluster.auth.handshake import summary
from tfdist._src.cluster.cluster_spec import port_of
from tfdist._src.cluster.net.dns import resolve
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.observation import ask
from tfdist._src.cluster.resolvers.registry import RESOLVERS
from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.launch.flight.diagnosis import diagnose
from tfdist._src.launch.flight.merge import merge, read
from tfdist._src.launch.flight.report import to_json, to_text
from tfdist._src.launch.live import find_job, live_json, live_text, ranks
from tfdist._src.options import Options
from tfdist.errors import ClusterError, LaunchError, TlsError


class ProbeResult(enum.Enum):
    """The result of `probe`; the value of each member is the text that the user sees."""

    LISTENING = "reachable, and listening"
    REFUSED = "reachable, but not listening yet, which is normal before the start"
    UNRESOLVED = "its name does not resolve"
    SILENT = "no answer"


def probe(address: str, timeout: float) -> ProbeResult:
    """Tests whether a worker can be reached: opens a TCP connection to it and closes it again.

    Args:
        address: `"host:port"`.
        timeout: the time limit in seconds. It applies separately to the resolution of the name and
            to the opening of the connection.

    Example:
        >>> probe("127.0.0.1:1", 1.0).name
        'REFUSED'
    """
    try:
        endpoints = resolve(address, timeout)
    except OSError:
        return ProbeResult.UNRESOLVED
    result = ProbeResult.SILENT
    for family, endpoint in endpoints:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout / len(endpoints))
            try:
                connection.connect(endpoint)
                return ProbeResult.LISTENING
            except ConnectionRefusedError:
                result = ProbeResult.REFUSED
            except OSError:
                pass  # The host does not answer, or there is no route to the host.
    return result


_TLS = "between workers"


def check_tls(context: Context) -> Section:
    """Loads the TLS certificate, its key and the CA, and checks that they match."""
    try:
        tls = Tls.load(Options.from_environment(dict(context.environment)))
    except TlsError as error:
        return Section([(_TLS, "on, but invalid")], [str(error)])
    except ValueError:  # `check_settings` reports the details.
        return Section([(_TLS, "a setting is invalid")])
    if tls is None:
        return Section([(_TLS, "off")])
    return Section([(_TLS, "on"), ("certificate", f"{tls.subject}, until {tls.expires}")])


_METRICS = "Prometheus"


def check_metrics(context: Context) -> Section:
    """Checks that prometheus_client is installed and that the metrics port is free.

    To test the port, the check listens on it for a moment.
    """
    try:
        options = Options.from_environment(dict(context.environment))
    except ValueError:  # `check_settings` reports the details.
        return Section([(_METRICS, "a setting is invalid")])
    if not options.metrics_port:
        return Section([(_METRICS, "off")])
    try:
        job = from_environment(context.environment)
    except ClusterError:  # `check_workers` reports the details.
        job = Topology()
    host = options.metrics_host
    port = port_of(options.metrics_port, [worker.address for worker in job.workers], job.rank)
    section = Section()
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
        section.add(_METRICS, f"port {port} of {host}, which is free")
    except (OSError, OverflowError) as error:
        section.add(_METRICS, f"port {port} of {host}, unusable")
        section.problems.append(
            f"Metrics cannot be served on port {port} of {host} ({error}): choose another "
            "TFDIST_METRICS_PORT or TFDIST_METRICS_HOST"
        )
    if importlib.util.find_spec("prometheus_client") is None:
        section.problems.append(
            "TFDIST_METRICS_PORT is set, but the package prometheus_client is not installed: pip "
            "install 'tfdist[metrics]', or unset the variable"
        )
    return section


def report_job(job: str, *, interval: float, as_json: bool, all_ranks: bool) -> str:
    """Queries rank 0 of a running job twice, and reports the job's state.

    The rates in the report refer to the time between the two queries.

    Args:
        job: the address of rank 0 in TF_CONFIG, `"host:port"`, or the ID of a process of the job on
            this host. The process can be a worker or `tfdist run`. If a process ID is given, the
            secret and the TLS files are taken from the environment of the process.
        interval: the number of seconds between the two queries.
        as_json: whether to return a JSON object instead of text.
        all_ranks: whether the text lists every rank. By default, it lists at most 64 ranks.

    Raises:
        TfdistError: the job cannot be queried. The message is a single line.
    """
    address, environment = find_job(int(job)) if job.isdecimal() else (job, None)
    try:
        options = Options.from_environment(environment)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    before = ask(address, options)
    time.sleep(interval)
    found = ranks(before, ask(address, options))
    if as_json:
        return live_json(address, found)
    return live_text(found, most=None) if all_ranks else live_text(found)


def report_flight(path: Path, *, as_json: bool) -> str:
    """Reads the flight logs in a folder, and explains why the job failed or hangs.

    Args:
        path: the folder.
        as_json: whether to return a JSON object instead of text.

    Raises:
        LaunchError: the folder cannot be read, or contains no flight log that can be read.
    """
    try:
        folder = read(path)
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be read ({error.strerror}). Pass the folder with the flight logs."
        ) from error
    if not folder.logs:
        skipped = "".join(f" {line}." for line in folder.skipped)
        raise LaunchError(
            f"{path} has no flight log that can be read (flight-rank*.json).{skipped} Workers "
            f"write them on an error, when a collective stalls and on SIGUSR1: to "
            f"TFDIST_FLIGHT_DIR, or to the launcher's log folder (--log-dir)."
        )
    diagnosis = diagnose(merge(folder.logs))
    return (to_json if as_json else to_text)(diagnosis, folder)


_SECONDS = 5.0
_AT_ONCE = 32


def check_workers(context: Context) -> Section:
    """Checks the job that this process belongs to, and the connections to its other workers.

    The check listens on this worker's own address for a moment, to see whether the address is free.
    Then it connects to every other worker with a known address. In some clusters, the workers
    report their addresses to rank 0 only when they start; then only rank 0's address can be known.
    """
    section = Section([("looked for", ", ".join(RESOLVERS))])
    try:
        found = find(context.environment)
    except ClusterError as error:
        section.add("found", "an invalid description of a job")
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
        where = found.exchange.meeting or "an address that rank 0 chooses and its launcher sends"
        section.add("addresses", f"the workers report theirs to rank 0, at {where}")
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


def _check_authentication(section: Section, found: ResolvedJob, context: Context) -> None:
    with contextlib.suppress(ValueError):  # `check_settings` reports the details.
        options = Options.from_environment(dict(context.environment))
        text = summary(found.topology, options)
        if found.exchange is not None and not (options.secret or options.tls):
            if found.exchange.share is not None:
                text = "a secret that rank 0 creates and its launcher sends"
            elif found.exchange.seals:
                text = "a secret that rank 0 creates, sealed by MUNGE"
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
