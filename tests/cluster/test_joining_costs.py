"""What joining costs a rank does not grow faster than the number of ranks."""

import pytest

from tfdist._src.cluster import Topology, Worker
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.mesh.subgroups import SessionPlan, from_runs, group_of, to_runs
from tfdist._src.cluster.net.framing import Decoder, encode
from tfdist._src.cluster.session.shared_state import decode_result, encode_result
from tfdist.errors import ProgramMismatchError


def topology(ranks, rank=0):
    workers = tuple(Worker("worker", i, f"host{i // 8}.example.org:2222") for i in range(ranks))
    return Topology(workers, rank, "worker", rank)


def reports(ranks, members):
    """What each rank says of itself; eight to a host."""
    return [
        {
            "members": to_runs(members(rank)),
            "identity": str(rank),
            "host": f"host {rank // 8}",
            "ports": None,
        }
        for rank in range(ranks)
    ]


def everyone(ranks):
    return lambda rank: list(range(ranks))


@pytest.mark.parametrize("numbers", [[], [3], [0, 1, 2], [5, 5, 5], [0, 2, 4, 5, 9, 9, 1]])
def test_numbers_survive_their_encoding_as_runs(numbers):
    assert from_runs(to_runs(numbers)) == numbers


def test_a_hello_has_one_size():
    sizes = {len(encode(vars(Identity.of(topology(ranks))))) for ranks in (2, 16, 1024)}
    assert max(sizes) - min(sizes) < 20  # digits


def test_what_all_agree_on_has_one_size():
    small, large = (encode_result(0, [b"the same"] * ranks) for ranks in (2, 1024))
    assert len(large) - len(small) < 10


def test_results_are_those_of_all_ranks():
    payloads = [b"a", b"a", b"", b"b", b"a"]
    frame = encode_result(7, payloads)
    ((header, payload),) = Decoder(1000).feed(frame)
    assert decode_result(header, payload, 5) == payloads
    with pytest.raises(ValueError):
        decode_result(header, payload, 6)


def test_a_group_of_all_ranks_is_told_in_a_few_words():
    for ranks in (16, 1024):
        told = SessionPlan(topology(ranks), "mesh").split(reports(ranks, everyone(ranks)))
        assert len({str(one) for one in told}) == 1
        assert len(encode({"kind": "reply", **told[0]})) < 150
        group = group_of(topology(ranks, 5), told[5])
        assert group.members == tuple(range(ranks))
        assert group.hosts == tuple(rank // 8 for rank in range(ranks))
        assert group.identity == "0" and group.rank == 5


def test_hosts_in_any_order():
    given = reports(6, everyone(6))
    for rank, host in enumerate("abacba"):
        given[rank]["host"] = host
    told = SessionPlan(topology(6), "mesh").split(given)
    assert group_of(topology(6), told[0]).hosts == (0, 1, 0, 2, 1, 0)


def test_each_rank_hears_of_its_own_group_alone():
    """Of two ranks each, as in pipelines; rank 7 is in none."""

    def members(rank):
        return [] if rank in (6, 7) else [rank // 2 * 2, rank // 2 * 2 + 1]

    told = SessionPlan(topology(8), "mesh").split(reports(8, members))
    assert told[6] == told[7] == {}
    assert group_of(topology(8, 6), told[6]) is None
    for rank in range(6):
        group = group_of(topology(8, rank), told[rank])
        assert group.members == (rank // 2 * 2, rank // 2 * 2 + 1)


@pytest.mark.parametrize(
    "lists",
    [
        {0: [0, 1], 1: [0, 1, 2], 2: [0, 1, 2]},
        {0: [0, 1, 2], 1: [], 2: [0, 1, 2]},
        {0: [0, 1], 1: [1, 0], 2: []},
    ],
)
def test_ranks_that_do_not_agree_on_a_group(lists):
    with pytest.raises(ProgramMismatchError, match="Pass the same list on all members"):
        SessionPlan(topology(3), "mesh").split(reports(3, lambda rank: lists[rank]))


def test_memory_of_a_host():
    plan = SessionPlan(topology(16), "mesh")
    plan.split(reports(16, everyone(16)))
    told = plan.share([{"name": "first"}, *[{}] * 15])
    assert [one["name"] for one in told] == ["first"] * 8 + [None] * 8
    assert from_runs(told[0]["without"]) == list(range(8, 16))
