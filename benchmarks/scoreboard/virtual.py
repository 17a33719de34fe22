"""Virtual time, with the event loop of the fault tests: hours pass in a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from scoreboard.testkit import tool

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time. The time starts at 0."""

    async def once() -> T:
        return await main

    return cast("T", tool("virtual_time").run(once, backend="asyncio"))
