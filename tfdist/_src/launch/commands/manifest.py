"""`tfdist manifest`: prints the Kubernetes objects that run a job."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist._src.cluster.auth.handshake import new_secret
from tfdist._src.launch.console import OneLineParser, count, typed
from tfdist._src.options import PREEMPTED, InternalVariable, Variable

# The name of a pod begins with the job's name. It is also a DNS label, which has at most 63
# characters.
_MAX_NAME = 45
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Volume:
    """A persistent volume claim, and the path at which the pods mount the volume."""

    claim: str
    path: str


@dataclass(frozen=True)
class ManifestOptions:
    """The options of `tfdist manifest`; see the help text for their meaning.

    Attributes:
        name: the name of the job, and also of its service and its Secret.
        image: the container image.
        command: the command that each worker runs.
        workers: the number of workers, one per pod.
        kind: the kind of Kubernetes object that runs the job: "job", "jobset" or "tfjob".
        namespace: the Kubernetes namespace; "" for the namespace of kubectl's current context.
        gpus: the number of GPUs of each worker.
        cpus: the number of CPUs of each worker, as a Kubernetes quantity; "" to request no number.
        memory: the memory of each worker, as a Kubernetes quantity; "" to request no amount.
        max_restarts: the maximum number of restarts after failures. It applies to each worker; with
            a JobSet, it applies to the whole job.
        grace: the number of seconds between SIGTERM and SIGKILL when Kubernetes stops a pod.
        start_timeout: the number of seconds in which all pods must start. The time begins when the
            first worker has created its strategy.
        elastic: whether workers may join and leave the running job.
        probes: whether Kubernetes checks that the workers respond.
        volumes: the volumes that the pods mount.
        variables: additional environment variables of the workers, as pairs of name and value.
    """

    name: str
    image: str
    command: tuple[str, ...]
    workers: int = 2
    kind: str = "job"
    namespace: str = ""
    gpus: int = 0
    cpus: str = ""
    memory: str = ""
    max_restarts: int = 3
    grace: int = 60
    start_timeout: int = 1800
    elastic: bool = False
    probes: bool = True
    volumes: tuple[Volume, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def parse(arguments: Sequence[str], kinds: Sequence[str]) -> ManifestOptions:
    """Parses the command line.

    Args:
        arguments: the command line, without `tfdist manifest`.
        kinds: the valid values of `--kind`; the first value is the default.

    Raises:
        SystemExit: on a usage error (code 2), or after printing the help (code 0).

    Example:
        >>> parse(["--name", "a", "--image", "a:1", "train.py", "-n", "3"], ["job"]).command
        ('python', '-u', 'train.py', '-n', '3')
    """
    parser = _parser(kinds)
    values = parser.parse_args(arguments)
    if values.elastic and values.kind != "job":
        parser.error("--elastic requires --kind job: the other kinds restart all workers")
    if values.elastic and values.workers == 1:
        parser.error("--elastic requires --workers 2 or more: a single worker admits no others")
    program = [word for i, word in enumerate(values.program) if (i, word) != (0, "--")]
    if not program:
        parser.error("no script given; for example: tfdist manifest --name a --image b train.py")
    fields = {name: value for name, value in vars(values).items() if value is not None}
    del fields["program"]
    for name in ("volumes", "variables"):
        fields[name] = tuple(fields[name])
    return ManifestOptions(**fields, command=("python", "-u", *program))


def _parser(kinds: Sequence[str]) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="tfdist manifest",
        usage="%(prog)s --name NAME --image IMAGE [options] script.py [arguments]",
        description="Prints what Kubernetes needs to run a script as several workers, one per pod: "
        "a headless\nservice, a Secret with the job's own secret, and the job.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--name",
        type=_matching(_NAME, "lower-case letters, digits and '-'", _MAX_NAME),
        required=True,
        help="the job's name",
    )
    add(
        "--image",
        required=True,
        type=_matching(re.compile(r"\S+"), "an image"),
        help="the container image, with Python, tfdist and the script",
    )
    add("--workers", type=count(1), default=2, metavar="N", help="pods (default: 2)")
    add(
        "--kind",
        choices=kinds,
        default=kinds[0],
        help="an Indexed Job, which needs nothing but Kubernetes 1.29; a JobSet, whose workers all "
        "start again when one fails; or Kubeflow's TFJob (default: job)",
    )
    add(
        "--namespace",
        type=_matching(_DNS_LABEL, "lower-case letters, digits and '-'", 63),
        metavar="NS",
        help="the namespace (default: that of kubectl)",
    )
    add("--gpus", type=count(0), default=0, metavar="N", help="GPUs of each worker (default: 0)")
    add(
        "--cpus",
        metavar="N",
        type=_matching(_QUANTITY, "a quantity such as 4 or 500m"),
        help="processors of each worker (default: the cluster's)",
    )
    add(
        "--memory",
        type=_matching(_QUANTITY, "a quantity such as 16Gi"),
        metavar="N",
        help="memory of each worker (default: the cluster's)",
    )
    add(
        "--max-restarts",
        type=count(0),
        default=3,
        metavar="N",
        help="how often each worker (with a JobSet, the whole job) is restarted after a failure; a "
        "preemption after which all workers have saved does not count (default: 3)",
    )
    add(
        "--grace",
        type=count(0),
        default=60,
        metavar="SECONDS",
        help="between SIGTERM and SIGKILL, for a last snapshot (default: 60)",
    )
    add(
        "--start-timeout",
        type=count(1),
        default=1800,
        metavar="SECONDS",
        help="time limit for all pods to start, once the first has created its strategy (default: "
        "1800)",
    )
    add(
        "--elastic",
        action="store_true",
        help="let the remaining workers continue if one fails, and admit new ones; needs the "
        "callback tfdist.callbacks.Elastic",
    )
    add(
        "--no-probes",
        action="store_false",
        dest="probes",
        help="do not ask each worker for its metrics, which needs prometheus_client in the image, "
        "to see whether it responds",
    )
    add(
        "--volume",
        type=typed(_volume),
        action="append",
        default=[],
        dest="volumes",
        metavar="CLAIM:/PATH",
        help="mount a persistent volume claim; may be repeated",
    )
    add(
        "--env",
        type=typed(_variable),
        action="append",
        default=[],
        dest="variables",
        metavar="NAME=VALUE",
        help="set a variable; may be repeated",
    )
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


_EPILOG = """\
examples:
  tfdist manifest --name train --image repo/train:1 --workers 4 train.py | kubectl apply -f -
  tfdist manifest --name train --image repo/train:1 --gpus 8 --memory 64Gi \\
      --volume data:/data -- -m project.train --epochs 10

Every call generates a new secret; keep the output to apply it again to a running job.
docs/guide/clusters.md describes what happens if a worker fails or is preempted."""


def _matching(pattern: re.Pattern[str], what: str, longest: int = 253) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not pattern.fullmatch(text) or len(text) > longest:
            raise ValueError(f"must be {what}, up to {longest} characters. Received: {text!r}")
        return text

    return typed(read)


def _volume(text: str) -> Volume:
    claim, _, path = text.partition(":")
    if not _CLAIM.fullmatch(claim) or not path.startswith("/") or ":" in path:
        raise ValueError(f"must be CLAIM:/PATH. Received: {text!r}")
    return Volume(claim, path)


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given or not _VARIABLE.fullmatch(name):
        raise ValueError(f"must be NAME=VALUE. Received: {text!r}")
    return name, value


# Without quotes, every YAML parser reads a text of this form as a string, unless the text is one of
# the words below.
_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])


def to_yaml(value: Any, indent: int = 0) -> str:
    """Formats a value in YAML's block style.

    Strings that YAML parsers might read as another type are quoted, as in JSON.

    Args:
        value: a dict or a list. It may contain dicts with string keys, lists, strings, integers and
            booleans.
        indent: the number of spaces before each line.

    Example:
        >>> print(to_yaml({"kind": "Job", "args": ["-u", "a b"], "spec": {}}), end="")
        kind: Job
        args:
        - "-u"
        - "a b"
        spec: {}
    """
    pad = " " * indent
    lines = []
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, dict) and item:
                lines.append(f"{pad}{_scalar(key)}:\n{to_yaml(item, indent + 2)}")
            elif isinstance(item, list) and item:
                lines.append(f"{pad}{_scalar(key)}:\n{to_yaml(item, indent)}")
            else:
                lines.append(f"{pad}{_scalar(key)}: {_scalar(item)}\n")
    else:
        for item in value:
            text = to_yaml(item, indent + 2) if _is_block(item) else f"{pad}  {_scalar(item)}\n"
            lines.append(f"{pad}- {text[indent + 2 :]}")
    return "".join(lines)


def _is_block(value: Any) -> bool:
    return isinstance(value, (dict, list)) and bool(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


# The port of each worker. TFJob uses the same port by convention.
PORT = 2222
_METRICS_PORT = 9400
_INSTANCE_LABEL = "app.kubernetes.io/instance"
_PROBE_SECONDS = 10
# The number of seconds in which a pod must import TensorFlow and prepare its data, before it starts
# to create its strategy.
_BEFORE_STRATEGY = 600
# The liveness probe must tolerate a worker that answers slowly while it traces a large model, and
# must detect a worker that is stopped (SIGSTOP), which never answers.
_LIVENESS = {"periodSeconds": 30, "timeoutSeconds": 20, "failureThreshold": 5}


def metadata(options: ManifestOptions) -> dict[str, Any]:
    """Returns the metadata that all objects of the job have in common."""
    place = {"namespace": options.namespace} if options.namespace else {}
    return {"name": options.name, **place, "labels": labels(options)}


def labels(options: ManifestOptions) -> dict[str, str]:
    """Returns the labels of all objects of the job; the service selects the pods by a label."""
    return {"app.kubernetes.io/managed-by": "tfdist", _INSTANCE_LABEL: options.name}


def secret(options: ManifestOptions) -> dict[str, Any]:
    """Returns a Secret with a new random secret for the job."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(options),
        "stringData": {"secret": new_secret()},
    }


def service(options: ManifestOptions) -> dict[str, Any]:
    """Returns the headless service, which makes the pods' DNS names resolve.

    The names resolve even before the pods are ready.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_INSTANCE_LABEL: options.name},
            "ports": [{"name": "tfdist", "port": PORT}],
        },
    }


def pod_spec(
    options: ManifestOptions, variables: dict[str, str], *, container: str, port: str
) -> dict[str, Any]:
    """Returns the specification of a worker's pod.

    Args:
        options: the options of the command.
        variables: the environment variables that this kind of job needs, by name.
        container: the name of the pod's container.
        port: the name of the container's port for the other workers.
    """
    given = {
        **variables,
        Variable.START_TIMEOUT: str(options.start_timeout),
        **({Variable.METRICS_PORT: str(_METRICS_PORT)} if options.probes else {}),
        **dict(options.variables),
    }
    from_secret = {"secretKeyRef": {"name": options.name, "key": "secret"}}
    worker: dict[str, Any] = {
        "name": container,
        "image": options.image,
        "command": list(options.command),
        "env": [
            *({"name": name, "value": value} for name, value in given.items()),
            {"name": Variable.SECRET, "valueFrom": from_secret},
            *(_metrics_address() if options.probes else []),
        ],
        "ports": [{"name": port, "containerPort": PORT}],
        "resources": _resources(options),
    }
    if options.probes:
        worker["ports"].append({"name": "metrics", "containerPort": _METRICS_PORT})
        asked = {"httpGet": {"path": "/metrics", "port": "metrics"}}
        # The probes query the metrics, which a worker serves once its strategy has connected to
        # the other workers.
        patience = (_BEFORE_STRATEGY + options.start_timeout) // _PROBE_SECONDS
        startup = {"periodSeconds": _PROBE_SECONDS, "failureThreshold": patience}
        worker["startupProbe"] = {**asked, **startup}
        worker["livenessProbe"] = {**asked, **_LIVENESS}
    spec = {
        # Otherwise Python would be the process with PID 1, which ignores SIGTERM by default.
        "shareProcessNamespace": True,
        # Otherwise Kubernetes would set variables for each service of the namespace. For a service
        # with the name tfdist-metrics, this would be TFDIST_METRICS_PORT.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": options.grace,
        "containers": [worker],
    }
    if options.volumes:
        names = [f"volume-{number}" for number in range(len(options.volumes))]
        worker["volumeMounts"] = [
            {"name": name, "mountPath": volume.path}
            for name, volume in zip(names, options.volumes, strict=True)
        ]
        spec["volumes"] = [
            {"name": name, "persistentVolumeClaim": {"claimName": volume.claim}}
            for name, volume in zip(names, options.volumes, strict=True)
        ]
    return spec


def _metrics_address() -> list[dict[str, Any]]:
    """Returns the environment variable that makes a worker serve its metrics at the pod's address.

    By default, a worker serves its metrics at the loopback address, which the probes cannot reach.
    """
    own = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [{"name": Variable.METRICS_HOST, "valueFrom": own}]


def _resources(options: ManifestOptions) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if options.memory:
        limits["memory"] = options.memory
    requests = dict(limits)
    if options.cpus:
        requests["cpu"] = options.cpus
    if options.gpus:
        limits["nvidia.com/gpu"] = str(options.gpus)
    return {name: asked for name, asked in (("requests", requests), ("limits", limits)) if asked}


_USAGE_ERROR = 2


def indexed_job(options: ManifestOptions) -> list[dict[str, Any]]:
    """Returns the Kubernetes objects of a job of the kind "job", an Indexed Job.

    The preemption of a pod does not count as a failure of its worker, and a usage error ends the
    job. If the job is not elastic, all workers that lose a peer fail too. Kubernetes then restarts
    all workers, and they connect again.
    """
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        _on_exit_code("Ignore", PREEMPTED),
        _on_exit_code("FailJob", _USAGE_ERROR),
    ]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(options),
        "spec": {
            **indexed(options),
            "backoffLimitPerIndex": options.max_restarts,
            # An elastic job continues without a worker that fails repeatedly.
            **({} if options.elastic else {"maxFailedIndexes": 0}),
            "podFailurePolicy": {"rules": rules},
            "podReplacementPolicy": "Failed",
            "template": template(options),
        },
    }
    return [secret(options), service(options), job]


def indexed(options: ManifestOptions) -> dict[str, Any]:
    """Returns the fields that make a Kubernetes Job an Indexed Job with one pod per worker."""
    return {
        "completionMode": "Indexed",
        "completions": options.workers,
        "parallelism": options.workers,
    }


def template(options: ManifestOptions) -> dict[str, Any]:
    """Returns the template of the workers' pods.

    The environment variables in the template let a worker find the other workers through the
    service.
    """
    variables = {Variable.WORKERS: str(options.workers), Variable.SERVICE: options.name}
    if options.elastic:
        variables[InternalVariable.ELASTIC] = "1"
    spec = pod_spec(options, variables, container="worker", port="tfdist")
    own = {"subdomain": options.name, "restartPolicy": "Never"}
    return {"metadata": {"labels": labels(options)}, "spec": {**own, **spec}}


def _on_exit_code(action: str, code: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"operator": "In", "values": [code]}}


# These rules make the JobSet's child Job fail with the reason PodFailurePolicy if a worker was
# preempted. The JobSet then restarts without counting the restart.
_PREEMPTED_RULES = [
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}},
]


def jobset(options: ManifestOptions) -> list[dict[str, Any]]:
    """Returns the Kubernetes objects of a job of the kind "jobset".

    There is no service among them, because the JobSet creates its own service.
    """
    ignored = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    job_spec = {
        **indexed(options),
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": _PREEMPTED_RULES},
        "template": template(options),
    }
    made = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(options),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": options.name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {"maxRestarts": options.max_restarts, "rules": [ignored]},
            "successPolicy": {"operator": "All"},
            "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": job_spec}}],
        },
    }
    return [secret(options), made]


def tfjob(options: ManifestOptions) -> list[dict[str, Any]]:
    """Returns the Kubernetes objects of a job of the kind "tfjob".

    There is no service among them, because Kubeflow's training operator creates the services. The
    restart policy is not `ExitCode`, because this policy would not restart a preempted worker,
    which exits with code 75.
    """
    # The training operator prescribes the names of the container and of the port.
    spec = pod_spec(options, {}, container="tensorflow", port="tfjob-port")
    worker = {
        "replicas": options.workers,
        "restartPolicy": "OnFailure",
        "template": {"metadata": {"labels": labels(options)}, "spec": spec},
    }
    made = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": metadata(options),
        "spec": {
            "runPolicy": {
                # If one worker fails, all workers fail, and the operator counts each failure.
                "backoffLimit": options.max_restarts * options.workers + 1,
                "cleanPodPolicy": "Running",
            },
            "successPolicy": "AllWorkers",
            "tfReplicaSpecs": {"Worker": worker},
        },
    }
    return [secret(options), made]


_OBJECTS: dict[str, Callable[[ManifestOptions], list[dict[str, Any]]]] = {
    "job": indexed_job,
    "jobset": jobset,
    "tfjob": tfjob,
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: the command line, without `tfdist manifest`.

    Returns:
        0.

    Raises:
        SystemExit: on a usage error (code 2), or after printing the help (code 0).
    """
    options = parse(arguments, tuple(_OBJECTS))
    print("---\n".join(to_yaml(made) for made in _OBJECTS[options.kind](options)), end="")
    return 0
