"""TF_CONFIG becomes a topology, and every mistake in it a one-line error with a remedy."""

import json

import pytest

from tfdist._src.cluster import Topology, from_environment, from_tf_config
from tfdist.errors import ClusterError

WORKERS = ["a:1", "b:1", "c:1"]


def text(cluster, task=None, **extra):
    return json.dumps({"cluster": cluster, "task": task, **extra})


def worker(index):
    return {"type": "worker", "index": index}


@pytest.mark.parametrize("value", [None, "", " \n", "{}", '{"cluster": {}, "task": {}}'])
def test_an_empty_tf_config_is_a_single_process(value):
    assert from_tf_config(value) == Topology()


def test_the_environment_is_read():
    assert from_environment({}) == Topology()
    value = text({"worker": WORKERS}, worker(2))
    assert from_environment({"TF_CONFIG": value}).rank == 2


@pytest.mark.parametrize(
    ("cluster", "task", "rank", "order"),
    [
        ({"worker": WORKERS}, worker(0), 0, WORKERS),
        ({"worker": WORKERS}, worker("2"), 2, WORKERS),
        ({"worker": ["a:1"]}, worker(0), 0, ["a:1"]),
        ({"worker": WORKERS, "chief": ["x:1"]}, worker(1), 2, ["x:1", *WORKERS]),
        (
            {"worker": WORKERS, "chief": ["x:1"]},
            {"type": "chief", "index": 0},
            0,
            ["x:1", *WORKERS],
        ),
        ({"worker": ["a:1", "b:1"], "evaluator": ["e:1"]}, worker(1), 1, ["a:1", "b:1"]),
        ({"worker": {"1": "b:1", "0": "a:1"}}, worker(1), 1, ["a:1", "b:1"]),
        ({"worker": ["[::1]:2222", "[::1]:2223"]}, worker(0), 0, ["[::1]:2222", "[::1]:2223"]),
    ],
)
def test_ranks_follow_the_chief_and_the_order_of_workers(cluster, task, rank, order):
    topology = from_tf_config(text(cluster, task))
    assert topology.rank == rank
    assert [w.address for w in topology.workers] == order
    assert (topology.task_type, topology.task_index) == (task["type"], int(task["index"]))
    assert topology.me.task_type == task["type"]


@pytest.mark.parametrize("listed", [{}, {"evaluator": ["e:1"]}])
def test_evaluator_is_not_in_the_group(listed):
    task = {"type": "evaluator", "index": 0}
    topology = from_tf_config(text({"worker": WORKERS, **listed}, task))
    assert topology == Topology(task_type="evaluator", task_index=0)
    assert topology.size == 1


def test_other_keys_are_ignored():
    value = text({"worker": WORKERS}, worker(1), environment="cloud", rpc_layer="grpc")
    assert from_tf_config(value).rank == 1


TASK = worker(0)
MISTAKES = {
    "not json": ("{cluster", ["TF_CONFIG is not JSON", "'{cluster'"]),
    "not an object": ("[1]", ["TF_CONFIG must be a JSON object", "'[1]'"]),
    "no cluster": ('{"task": {}}', ['lacks "cluster"']),
    "a dynamic TFJob": (
        '{"sparseCluster": {"worker": {"0": "a:1"}, "ps": []}, "task": {}}',
        ["knows only itself", "enableDynamicWorker", "'a:1'"],
    ),
    "no task": ('{"cluster": {"worker": ["a:1"]}}', ['lacks "task"']),
    "cluster no object": (text(["a:1"], TASK), ['TF_CONFIG["cluster"] must be', "['a:1']"]),
    "task no object": (text({"worker": WORKERS}, "worker"), ['TF_CONFIG["task"] must be']),
    "no type": (text({"worker": WORKERS}, {"index": 0}), ['TF_CONFIG["task"] lacks "type"']),
    "no index": (text({"worker": WORKERS}, {"type": "worker"}), ['lacks "index"']),
    "unknown type": (
        text({"worker": WORKERS}, {"type": "wroker", "index": 0}),
        ['TF_CONFIG["task"]["type"] must be one of', "'wroker'"],
    ),
    "type no string": (
        text({"worker": WORKERS}, {"type": ["worker"], "index": 0}),
        ['TF_CONFIG["task"]["type"]', "['worker']"],
    ),
    "type not in cluster": (
        text({"worker": WORKERS}, {"type": "chief", "index": 0}),
        ['TF_CONFIG["task"]["type"] names a job', "'chief'", "['worker']"],
    ),
    "task is ps": (
        text({"worker": WORKERS, "ps": ["p:1"]}, {"type": "ps", "index": 0}),
        ["parameter servers", "Do not start this process", 'remove "ps"'],
    ),
    "cluster has ps": (
        text({"worker": WORKERS, "ps": ["p:1"]}, TASK),
        ['TF_CONFIG["cluster"]["ps"]', "parameter servers", 'Remove "ps"'],
    ),
    "unknown job": (
        text({"worker": WORKERS, "master": ["m:1"]}, TASK),
        ["unknown job", "'master'"],
    ),
    "index a word": (text({"worker": WORKERS}, worker("one")), ['["index"]', "integer", "'one'"]),
    "index a float": (text({"worker": WORKERS}, worker(1.0)), ['["index"]', "integer", "1.0"]),
    "index a bool": (text({"worker": WORKERS}, worker(True)), ['["index"]', "integer", "True"]),
    "index null": (text({"worker": WORKERS}, worker(None)), ['["index"]', "integer", "None"]),
    "index negative": (text({"worker": WORKERS}, worker(-1)), ['["index"]', ">= 0", "-1"]),
    "index too high": (text({"worker": WORKERS}, worker(3)), ['["index"]', "below 3", ": 3."]),
    "evaluator too high": (
        text({"worker": WORKERS, "evaluator": ["e:1"]}, {"type": "evaluator", "index": 1}),
        ['["index"]', "below 1"],
    ),
    "job no list": (
        text({"worker": "a:1"}, TASK),
        ['["cluster"]["worker"] must be a list', "'a:1'"],
    ),
    "job empty": (text({"worker": []}, TASK), ['["cluster"]["worker"] is empty']),
    "job empty dict": (text({"worker": {}}, TASK), ['["cluster"]["worker"] is empty']),
    "gap": (text({"worker": {"0": "a:1", "2": "c:1"}}, TASK), ["without gaps", "['0', '2']"]),
    "key no number": (text({"worker": {"zero": "a:1"}}, TASK), ["without gaps", "['zero']"]),
    "key twice": (text({"worker": {"0": "a:1", "00": "b:1"}}, TASK), ["without gaps"]),
    "address no string": (text({"worker": [5]}, TASK), ['["worker"][0] must be a string', ": 5."]),
    "no port": (text({"worker": ["a:1", "b"]}, TASK), ['["worker"][1] has no port', "'b'"]),
    "port empty": (text({"worker": ["a:"]}, TASK), ["has no port", "'a:'"]),
    "port a word": (text({"worker": ["a:http"]}, TASK), ["port that is not a number", "'a:http'"]),
    "port zero": (text({"worker": ["a:0"]}, TASK), ["outside 1 to 65535", "'a:0'"]),
    "port too high": (text({"worker": ["a:65536"]}, TASK), ["outside 1 to 65535"]),
    "no host": (text({"worker": [":1"]}, TASK), ["has no host", "':1'"]),
    "scheme": (text({"worker": ["grpc://a:1"]}, TASK), ["scheme", "'grpc://a:1'"]),
    "space": (text({"worker": ["a :1"]}, TASK), ["whitespace"]),
    "bare ipv6": (text({"worker": ["::1:2222"]}, TASK), ["brackets", "'::1:2222'"]),
    "ipv6 no port": (text({"worker": ["[::1]"]}, TASK), ["has no port", "'[::1]'"]),
    "same address": (
        text({"worker": ["a:1", "b:1", "A:1"]}, TASK),
        ['"worker"[0] and "worker"[2] the same address', "'A:1'"],
    ),
    "same address in two jobs": (
        text({"chief": ["a:1"], "worker": ["a:1"]}, TASK),
        ['"chief"[0] and "worker"[0] the same address'],
    ),
    "two chiefs": (
        text({"chief": ["a:1", "b:1"], "worker": ["c:1"]}, TASK),
        ['["chief"] must name one process', 'Move all but the first to "worker"'],
    ),
}


def test_mistakes_in_tf_config_are_refused_with_a_remedy():
    for name, (value, parts) in MISTAKES.items():
        with pytest.raises(ClusterError) as caught:
            from_tf_config(value)
        message = str(caught.value)
        for part in ["TF_CONFIG", "Received: ", *parts]:
            assert part in message, name
        assert "\n" not in message, name
        assert message.endswith("."), name  # the remedy
        assert not message.split("Received: ")[1].endswith("Received: "), name
