"""The fixture `sampling_simulator`: a new simulator for every test.

    @pytest.mark.sampling_simulator(surveys=5, seed=3)
    async def test_something(sampling_simulator):
        async with sampling_simulator.client() as client: ...

The marker takes the arguments of `Simulator`; without the marker the simulator is small. pytest loads this
module in every run where the package is installed, so it imports only pytest until the fixture is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sampling_async.simulator import Simulator


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "sampling_simulator(**arguments): arguments of the Simulator that the fixture with this name makes.",
    )


@pytest.fixture
def sampling_simulator(request: pytest.FixtureRequest) -> Simulator:
    """A new simulator with 5 surveys and 20 members, unless a `sampling_simulator` marker says otherwise.

    If there are several markers, the one closest to the test counts, argument by argument.
    """
    from sampling_async.simulator import Simulator  # noqa: PLC0415  see above

    arguments: dict[str, Any] = {"surveys": 5, "members": 20}
    # pytest gives the closest marker first. Reversed, its arguments are set last.
    for marker in reversed(list(request.node.iter_markers("sampling_simulator"))):
        if marker.args:
            raise pytest.UsageError(
                "the sampling_simulator marker takes only keyword arguments, such as seed=3"
            )
        arguments.update(marker.kwargs)
    return Simulator(**arguments)
