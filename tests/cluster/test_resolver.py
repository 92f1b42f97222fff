"""A ClusterResolver becomes the same topology as TF_CONFIG."""

import pytest

from tfdist._src.cluster import Topology, from_resolver
from tfdist.errors import ClusterError


class Spec:
    def __init__(self, jobs):
        self._jobs = jobs

    def __bool__(self):
        return bool(self._jobs)

    def as_dict(self):
        return self._jobs


class FakeResolver:
    def __init__(self, jobs, task_type=None, task_id=None):
        self._jobs = jobs
        self.task_type, self.task_id = task_type, task_id

    def cluster_spec(self):
        return None if self._jobs is None else Spec(self._jobs)


class LateResolver(FakeResolver):
    """Knows its task only after cluster_spec(), as Slurm's does."""

    def cluster_spec(self):
        self.task_type, self.task_id = "worker", 1
        return super().cluster_spec()


def test_a_resolver_without_a_cluster_is_a_single_process():
    for jobs in (None, {}):
        assert from_resolver(FakeResolver(jobs)) == Topology()


def test_lists_and_dicts():
    for jobs in (["a:1", "b:1"], {0: "a:1", 1: "b:1"}):
        topology = from_resolver(FakeResolver({"chief": ["c:1"], "worker": jobs}, "worker", 1))
        assert [w.address for w in topology.workers] == ["c:1", "a:1", "b:1"]
        assert topology.rank == 2


def test_task_known_late():
    assert from_resolver(LateResolver({"worker": ["a:1", "b:1"]})).rank == 1


@pytest.mark.parametrize(
    ("task", "name"), [((None, None), "task_type"), (("worker", None), "task_id")]
)
def test_a_resolver_without_a_task_is_refused(task, name):
    with pytest.raises(ClusterError) as caught:
        from_resolver(FakeResolver({"worker": ["a:1"]}, *task))
    for part in ("FakeResolver", f"its {name} is None", "Pass task_type=", "resolver.task_type ="):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("jobs", "task", "parts"),
    [
        ({"worker": ["a"]}, ("worker", 0), ['cluster_spec()["worker"][0] has no port']),
        ({"worker": ["a:1"]}, ("worker", 1), ["cluster_resolver.task_id must be below 1"]),
        ({"worker": ["a:1"]}, ("boss", 0), ["cluster_resolver.task_type must be one of"]),
        ({"worker": ["a:1"], "ps": ["p:1"]}, ("worker", 0), ["parameter servers"]),
        ({"worker": {0: "a:1", 2: "b:1"}}, ("worker", 0), ["without gaps"]),
    ],
)
def test_mistakes_of_a_resolver_are_named(jobs, task, parts):
    with pytest.raises(ClusterError) as caught:
        from_resolver(FakeResolver(jobs, *task))
    for part in parts:
        assert part in str(caught.value)
    assert "TF_CONFIG" not in str(caught.value)
