"""Groups of real worker processes for the pipeline's tests."""

from tests.ranks import Ranks

GROUPS = {
    "alone": Ranks(0),
    "2": Ranks(2),
    "4": Ranks(4),
    "4 on 2 hosts": Ranks(4, hosts=[0, 0, 0, 1]),
    "6 on 5 hosts": Ranks(6, hosts=[0, 1, 1, 2, 3, 4]),
}
