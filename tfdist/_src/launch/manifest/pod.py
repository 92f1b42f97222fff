"""What is the same for all kinds: a worker's pod, the service and the Secret."""

from __future__ import annotations

from typing import Any

from tfdist._src.cluster.auth.handshake import VARIABLE, new_secret
from tfdist._src.launch.manifest.options import ManifestOptions

# A worker listens there, as in TFJob's convention.
PORT = 2222
_METRICS_PORT = 9400
_LABEL = "app.kubernetes.io/instance"
_PROBE_SECONDS = 10
# Seconds in which a pod has to import TensorFlow, prepare its data and make its strategy.
_BEFORE_STRATEGY = 600
# A worker that traces a large model answers slowly; one that is stopped, never.
_LIVENESS = {"periodSeconds": 30, "timeoutSeconds": 20, "failureThreshold": 5}


def metadata(options: ManifestOptions) -> dict[str, Any]:
    """The metadata of each object."""
    place = {"namespace": options.namespace} if options.namespace else {}
    return {"name": options.name, **place, "labels": labels(options)}


def labels(options: ManifestOptions) -> dict[str, str]:
    """The labels of all objects, by which the service selects the pods."""
    return {"app.kubernetes.io/managed-by": "tfdist", _LABEL: options.name}


def secret(options: ManifestOptions) -> dict[str, Any]:
    """A new random secret for the job."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(options),
        "stringData": {"secret": new_secret()},
    }


def service(options: ManifestOptions) -> dict[str, Any]:
    """The headless service, which resolves the pods' names even before the pods are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {_LABEL: options.name},
            "ports": [{"name": "tfdist", "port": PORT}],
        },
    }


def pod_spec(
    options: ManifestOptions, variables: dict[str, str], *, container: str, port: str
) -> dict[str, Any]:
    """A worker's pod.

    Args:
        options: those of the command.
        variables: what the kind adds to the environment.
        container: the name of its container.
        port: the name of its port.
    """
    given = {
        **variables,
        "TFDIST_START_TIMEOUT": str(options.start_timeout),
        **({"TFDIST_METRICS_PORT": str(_METRICS_PORT)} if options.probes else {}),
        **dict(options.variables),
    }
    from_secret = {"secretKeyRef": {"name": options.name, "key": "secret"}}
    worker: dict[str, Any] = {
        "name": container,
        "image": options.image,
        "command": list(options.command),
        "env": [
            *({"name": name, "value": value} for name, value in given.items()),
            {"name": VARIABLE, "valueFrom": from_secret},
            *(_metrics_address() if options.probes else []),
        ],
        "ports": [{"name": port, "containerPort": PORT}],
        "resources": _resources(options),
    }
    if options.probes:
        worker["ports"].append({"name": "metrics", "containerPort": _METRICS_PORT})
        asked = {"httpGet": {"path": "/metrics", "port": "metrics"}}
        # Metrics begin once the strategy has met the other workers.
        patience = (_BEFORE_STRATEGY + options.start_timeout) // _PROBE_SECONDS
        startup = {"periodSeconds": _PROBE_SECONDS, "failureThreshold": patience}
        worker["startupProbe"] = {**asked, **startup}
        worker["livenessProbe"] = {**asked, **_LIVENESS}
    spec = {
        # So Python is not PID 1, which would ignore SIGTERM by default.
        "shareProcessNamespace": True,
        # Variables such as TFDIST_METRICS_PORT must not come from a service of that name.
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
    """Metrics are served at the pod's address, where Kubernetes asks for them, not at loopback."""
    own = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [{"name": "TFDIST_METRICS_HOST", "valueFrom": own}]


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
