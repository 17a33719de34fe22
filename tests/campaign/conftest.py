"""The simulator of most tests of campaigns."""

from __future__ import annotations

import pytest

from sampling_async.simulator import Simulator


@pytest.fixture
def sim():
    return Simulator(7, surveys=30, members=120)
