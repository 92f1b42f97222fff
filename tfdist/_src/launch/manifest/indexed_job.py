"""An Indexed Job: the pod of a failed worker is recreated under the same name."""

from __future__ import annotations

from typing import Any

from tfdist._src.exit_codes import PREEMPTED
from tfdist._src.launch.manifest.options import ManifestOptions
from tfdist._src.launch.manifest.pod import labels, metadata, pod_spec, secret, service

_USAGE_ERROR = 2


def indexed_job(options: ManifestOptions) -> list[dict[str, Any]]:
    """The objects to apply.

    A preempted pod does not count as a failure, and a usage error ends the job. Without `elastic`,
    workers that lose a peer fail as well; all are restarted and meet again.
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
            # An elastic job goes on without a worker that fails again and again.
            **({} if options.elastic else {"maxFailedIndexes": 0}),
            "podFailurePolicy": {"rules": rules},
            "podReplacementPolicy": "Failed",
            "template": template(options),
        },
    }
    return [secret(options), service(options), job]


def indexed(options: ManifestOptions) -> dict[str, Any]:
    """What makes a job an indexed one."""
    return {
        "completionMode": "Indexed",
        "completions": options.workers,
        "parallelism": options.workers,
    }


def template(options: ManifestOptions) -> dict[str, Any]:
    """A worker's pod, which finds the others by the service."""
    variables = {"TFDIST_WORKERS": str(options.workers), "TFDIST_SERVICE": options.name}
    if options.elastic:
        variables["TFDIST_ELASTIC"] = "1"
    spec = pod_spec(options, variables, container="worker", port="tfdist")
    own = {"subdomain": options.name, "restartPolicy": "Never"}
    return {"metadata": {"labels": labels(options)}, "spec": {**own, **spec}}


def _on_exit_code(action: str, code: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"operator": "In", "values": [code]}}
