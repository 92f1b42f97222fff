"""A JobSet: if a worker fails, all workers are stopped, and start again together."""

from __future__ import annotations

from typing import Any

from tfdist._src.exit_codes import PREEMPTED
from tfdist._src.launch.manifest.indexed_job import indexed, template
from tfdist._src.launch.manifest.options import ManifestOptions
from tfdist._src.launch.manifest.pod import metadata, secret

# With these the child Job reports that a worker was preempted.
_PREEMPTED_RULES = [
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}},
]


def jobset(options: ManifestOptions) -> list[dict[str, Any]]:
    """The objects to apply; the JobSet makes its own service."""
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
