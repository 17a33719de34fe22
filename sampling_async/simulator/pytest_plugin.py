"""The fixtures `sampling_simulator` and `sampling_inbox`: a new simulator for every test, and an inbox for it.

    @pytest.mark.sampling_simulator(surveys=5, seed=3)
    async def test_something(sampling_simulator):
        async with sampling_simulator.client() as client: ...

    @pytest.mark.sampling_simulator(notifying=Notifying(completes=1.0))
    async def test_notifications(sampling_simulator, sampling_inbox):
        async with sampling_inbox:
            ...
            await sampling_simulator.notifications.deliver(sampling_inbox)

The marker takes the arguments of `Simulator`; without the marker the simulator is small. pytest loads this
module in every run where the package is installed, so it imports only pytest until the fixture is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from sampling_async.notifications import Inbox
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


@pytest.fixture
def sampling_inbox(tmp_path: Path) -> Inbox:
    """A new inbox with a store in `tmp_path`. Register handlers, then enter it: `async with sampling_inbox`."""
    from sampling_async.notifications import Inbox  # noqa: PLC0415  see above

    return Inbox(tmp_path / "notifications.db", secrets="secret-of-the-tests")
