"""Ray Data, on a node of its own."""

from __future__ import annotations

import pytest
from clusters_kit import check, check_allocation, needs, ran

pytestmark = [
    needs("ray"),
    # Ray reads all of its own settings, even deprecated ones.
    *(
        pytest.mark.filterwarnings(rf"ignore:.{name}. is deprecated:DeprecationWarning")
        for name in ("use_push_based_shuffle", "use_polars", "use_arrow_tensor_v2")
    ),
]


@pytest.fixture
def ray():
    import ray  # noqa: PLC0415  where it is installed

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


def test_ray_gives_the_same_results(folder, ray):
    # Without this the whole panel would be one part.
    variables = ran("ray", ("batch_size=65_536", "batch_size=700"))
    check(folder, variables)
    check_allocation(folder, variables)
