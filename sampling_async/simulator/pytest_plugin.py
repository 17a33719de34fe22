"""The fixture `sampling_simulator`: a fresh simulator for every test.

    @pytest.mark.sampling_simulator(surveys=5, seed=3)
    async def test_something(sampling_simulator):
        async with sampling_simulator.client() as client: ...

The marker takes the arguments of `Simulator`; without it, the simulator is a small one. pytest loads this
module in every run wherever the package is installed, so it imports nothing but pytest until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sampling_async.simulator import Simulator


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        "sampling_simulator(**arguments): arguments of the Simulator that the fixture of that name gives.",
    )


@pytest.fixture
def sampling_simulator(request: pytest.FixtureRequest) -> Simulator:
    """A fresh simulator: 5 surveys and 20 members, unless a `sampling_simulator` marker says otherwise.

    Of several markers the closest one to the test counts, argument by argument.
    """
    from sampling_async.simulator import Simulator  # noqa: PLC0415  see above

    arguments: dict[str, Any] = {"surveys": 5, "members": 20}
    for marker in reversed(list(request.node.iter_markers("sampling_simulator"))):
        if marker.args:
            raise pytest.UsageError("the sampling_simulator marker takes keyword arguments only: seed=3")
        arguments.update(marker.kwargs)
    return Simulator(**arguments)
