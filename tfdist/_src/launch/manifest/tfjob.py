"""A TFJob of Kubeflow's training operator, which sets TF_CONFIG itself."""

from __future__ import annotations

from typing import Any

from tfdist._src.launch.manifest.options import ManifestOptions
from tfdist._src.launch.manifest.pod import labels, metadata, pod_spec, secret


def tfjob(options: ManifestOptions) -> list[dict[str, Any]]:
    """The objects to apply; the operator makes the services.

    `restartPolicy: ExitCode` would take the exit code of a preempted worker, 75, for final.
    """
    # Both names are the operator's.
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
                # All workers fail together, and the operator counts each of them.
                "backoffLimit": options.max_restarts * options.workers + 1,
                "cleanPodPolicy": "Running",
            },
            "successPolicy": "AllWorkers",
            "tfReplicaSpecs": {"Worker": worker},
        },
    }
    return [secret(options), made]
