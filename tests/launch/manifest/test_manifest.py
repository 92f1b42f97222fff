"""What `tfdist manifest` prints fits the schemas that the kinds have."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import yaml
from kubernetes.client import ApiClient

from tests.launch.manifest.schemas import JOBSET, TFJOB, check
from tfdist._src.launch.cli import main
from tfdist._src.launch.commands.manifest import to_yaml

MODELS = {"Secret": "V1Secret", "Service": "V1Service", "Job": "V1Job"}
FULL = (
    "--gpus 2 --cpus 500m --memory 16Gi --volume data:/data --volume c:/c --env A=b=c "
    "--namespace ours --workers 4 --max-restarts 5 --grace 90"
)
KINDS = ("job", "jobset", "tfjob")


@pytest.fixture
def objects(capsys):
    def objects(*arguments, program=("train.py", "--epochs", "3")):
        assert main(["manifest", "--name", "train", "--image", "a/b:1", *arguments, *program]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return objects


def read_by_client(made):
    """The object as the client of Kubernetes understands it."""
    client = ApiClient()
    response = SimpleNamespace(data=json.dumps(made))
    try:
        read = client.deserialize(response, MODELS[made["kind"]])
    except TypeError:
        read = client.deserialize(json.dumps(made), MODELS[made["kind"]], "application/json")
    return client.sanitize_for_serialization(read)


@pytest.mark.parametrize("kind", KINDS)
def test_every_object_fits_its_schema(objects, kind):
    for arguments in ([], FULL.split(), ["--no-probes"], ["--elastic"] if kind == "job" else []):
        for made in objects("--kind", kind, *arguments):
            if made["kind"] in MODELS:
                assert read_by_client(made) == made
            else:
                check(made, {"JobSet": JOBSET, "TFJob": TFJOB}[made["kind"]])
                for pod in pods([made]):
                    whole = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": pod}}
                    assert read_by_client(whole) == whole


def pods(made):
    """The templates of all pods."""
    found = []

    def walk(value):
        if isinstance(value, dict):
            if "containers" in value.get("spec", {}):
                found.append(value)
            for part in value.values():
                walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)

    walk(made)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_each_pod_gets(objects, kind):
    made = objects("--kind", kind, *FULL.split())
    (pod,) = pods(made)
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-u", "train.py", "--epochs", "3"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["A"] == "b=c"
    if kind != "tfjob":
        assert environment["TFDIST_WORKERS"] == "4"
        assert environment["TFDIST_SERVICE"] == pod["spec"]["subdomain"] == "train"
    given = {entry["name"]: entry for entry in container["env"] if "valueFrom" in entry}
    assert set(given) == {"TFDIST_SECRET", "TFDIST_METRICS_HOST"}
    assert given["TFDIST_METRICS_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    from_secret = given["TFDIST_SECRET"]
    (secret,) = [one for one in made if one["kind"] == "Secret"]
    assert from_secret["valueFrom"]["secretKeyRef"] == {"name": "train", "key": "secret"}
    assert re.fullmatch("[0-9a-f]{64}", secret["stringData"]["secret"])
    assert {one["metadata"]["namespace"] for one in made} == {"ours"}
    assert pod["spec"]["terminationGracePeriodSeconds"] == 90
    resources = container["resources"]
    assert resources["limits"] == {"memory": "16Gi", "nvidia.com/gpu": "2"}
    assert resources["requests"] == {"memory": "16Gi", "cpu": "500m"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {v["persistentVolumeClaim"]["claimName"]: v["name"] for v in pod["spec"]["volumes"]}
    assert {claim: mounts[name] for claim, name in claims.items()} == {"data": "/data", "c": "/c"}


def test_secrets_differ_and_modules_run(objects):
    first, second = (objects(program=("--", "-m", "project.train", "-x")) for _ in range(2))
    assert first[0]["stringData"] != second[0]["stringData"]
    command = pods(first)[0]["spec"]["containers"][0]["command"]
    assert command == ["python", "-u", "-m", "project.train", "-x"]


def test_texts_survive_yaml():
    texts = [
        "",
        "yes",
        "No",
        "1",
        "1.5",
        "0x1",
        "a b",
        "a: b",
        "# a",
        "- a",
        "ü\n\t",
        "\N{ROCKET}",
        "~",
        "null",
    ]
    texts += [
        "on",
        "1e3",
        "2026-01-01",
        "a'b",
        'a"b',
        "{}",
        "[",
        "&a",
        "*a",
        "!a",
        "%",
        "@",
        "`",
    ]
    value = {"texts": texts, "nested": [{"a": {"b": [["c"], {}]}}, []], "yes": True, "n": 3}
    assert yaml.safe_load(to_yaml(value)) == value


def test_a_wrong_line_is_one_clear_line(capsys):
    for line, complaint in {
        "--image a t.py": "required: --name",
        "--name A --image a t.py": "must be lower-case letters, digits and '-', up to 45",
        "--name a --image a": "no script given",
        "--name a --image a --memory lots t.py": "must be a quantity such as 16Gi",
        "--name a --image a --volume data t.py": "must be CLAIM:/PATH. Received: 'data'",
        "--name a --image a --env A t.py": "must be NAME=VALUE. Received: 'A'",
        "--name a --image a --kind pod t.py": "invalid choice: 'pod'",
        "--name a --image a --kind jobset --elastic t.py": "--elastic requires --kind job",
        "--name a --image a --workers 1 --elastic t.py": "--elastic requires --workers 2 or more",
        "--name a --image a --volume a_B:/x t.py": "must be CLAIM:/PATH. Received: 'a_B:/x'",
        "--name a --image a --volume a:/x:ro t.py": "must be CLAIM:/PATH. Received: 'a:/x:ro'",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main(["manifest", *line.split()])
        said = capsys.readouterr().err
        assert said.startswith("tfdist manifest: error: ") and said.count("\n") == 1
        assert complaint in said
