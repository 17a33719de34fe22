"""Our client in an event loop of this process, for what only it can do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sampling_async import SamplingClient

if TYPE_CHECKING:
    from speed.canned_server import Address


class OurClient:
    """A `SamplingClient`, open until the process ends; sections give it methods to call from afar."""

    def __init__(self, address: Address, width: int = 8) -> None:
        self.member_code = address.member_code
        self.runner = asyncio.Runner()
        self.client = SamplingClient(
            address.url, panel_guid=address.panel_guid, api_key=address.api_key, max_concurrency=width
        )
