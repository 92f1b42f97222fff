"""The fields of JobSet (v1alpha2) and TFJob (v1) that a manifest may have, and their types."""

from __future__ import annotations

from typing import Any

# A pod's template is checked by the models of Kubernetes' own client.
_POD = dict
_JOB = {
    "spec": {
        "completionMode": {"Indexed"},
        "completions": int,
        "parallelism": int,
        "backoffLimit": int,
        "podFailurePolicy": dict,
        "template": _POD,
    }
}
JOBSET = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"},
    "kind": {"JobSet"},
    "metadata": dict,
    "spec": {
        "network": {
            "enableDNSHostnames": bool,
            "subdomain": str,
            "publishNotReadyAddresses": bool,
        },
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [
                {
                    "name": str,
                    "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
                    "onJobFailureReasons": [
                        {"BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"}
                    ],
                }
            ],
        },
        "successPolicy": {"operator": {"All", "Any"}},
        "replicatedJobs": [{"name": str, "replicas": int, "template": _JOB}],
    },
}
TFJOB = {
    "apiVersion": {"kubeflow.org/v1"},
    "kind": {"TFJob"},
    "metadata": dict,
    "spec": {
        "runPolicy": {"backoffLimit": int, "cleanPodPolicy": {"All", "Running", "None"}},
        "successPolicy": {"", "AllWorkers"},
        "tfReplicaSpecs": {
            "Worker": {
                "replicas": int,
                "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
                "template": _POD,
            }
        },
    },
}


def check(value: Any, schema: Any, where: str = "") -> None:
    """Fails for a field or a value that the schema does not have."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        assert set(value) == set(schema), where
        for name, part in value.items():
            check(part, schema[name], f"{where}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for part in value:
            check(part, schema[0], f"{where}[]")
    elif isinstance(schema, set):
        assert value in schema, where
    else:
        assert type(value) is schema, where
