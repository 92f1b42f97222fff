"""Which pipelines are formed of the workers that are left, or have come."""

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.pipeline.placement.rank_mesh import arrange


@exhaustive
@pytest.mark.parametrize(
    ("pipeline_ranks", "size", "pipelines", "spare", "missing"),
    [
        ([0, 0, 1, 1], 2, ((0, 2), (1, 3)), (), ()),
        ([0, 0, 1], 2, ((0, 2),), (1,), ()),
        ([0, 1, 1], 2, ((0, 1),), (2,), ()),
        ([1, 0], 2, ((1, 0),), (), ()),
        ([2, 2, 1, 0], 3, ((3, 2, 0),), (1,), ()),
        ([0], 1, ((0,),), (), ()),
        ([0, 0], 2, None, (), (1,)),
        ([1], 3, None, (), (0, 2)),
    ],
)
def test_as_many_pipelines_as_there_are_workers_for(
    pipeline_ranks, size, pipelines, spare, missing
):
    found = arrange(pipeline_ranks, size)
    assert (found.mesh and found.mesh.pipelines) == pipelines
    assert (found.spare, found.missing) == (spare, missing)
