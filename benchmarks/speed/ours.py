"""Our client in an event loop of this process, for sections about our client only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sampling_async import SamplingClient

if TYPE_CHECKING:
    from speed.canned_server import Address


class OurClient:
    """A `SamplingClient` that is open until the process ends. Sections add methods that are called remotely."""

    def __init__(self, address: Address, width: int = 8) -> None:
        self.member_code = address.member_code
        self.runner = asyncio.Runner()
        self.client = SamplingClient(
            address.url, panel_guid=address.panel_guid, api_key=address.api_key, max_concurrency=width
        )
