"""What the scoreboard asks of a client, whoever wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence
    from types import TracebackType

    import httpx


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service is, and what lets a client in."""

    url: str
    panel_guid: str
    api_key: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client says of one quota ID of one member, in words the ledger's check knows."""

    member_code: str
    quota_id: int
    status: str
    url: str | None = None

    @property
    def invite(self) -> Outcome | None:
        """The invite, as the check reads it: something that has a `url`."""
        return self if self.url is not None else None


@dataclass(frozen=True, slots=True)
class Options:
    """How a client is set up. What is None or untouched is the client's own default.

    Attributes:
        concurrency: Requests at once.
        read: Seconds without a byte after which an answer is given up; None for the client's own.
        patience: Seconds an attempt may take in all, for a client that has such a limit.
        backoff: The scale of the waits between attempts; None for the client's own.
        transport: Something of httpx that carries requests instead of sockets.
        proxy: The address of an HTTP proxy on the way to the service.
        authority: A certificate to trust, as PEM; None for the usual ones.
        journal: A file that outlives the process, for a client that keeps one.
    """

    concurrency: int = 8
    read: float | None = None
    patience: float | None = None
    backoff: float | None = None
    transport: httpx.AsyncBaseTransport | None = None
    proxy: str | None = None
    authority: str | None = None
    journal: str | None = None


class Peer(Protocol):
    """A client under measurement, an async context manager."""

    def __init__(self, address: Address, options: Options) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def invite_all(self, requests: Iterable[tuple[str, Sequence[int]]]) -> list[Outcome]:
        """Ask invites for members, each to its quota IDs, and return all outcomes."""
        ...

    async def invite(self, member_code: str, quota_id: int) -> Any:
        """Make one Generate Invite."""
        ...

    async def quotas(self) -> Any:
        """Make one Get Quotas."""
        ...

    async def settings(self) -> Any:
        """Make one Get Settings."""
        ...

    def recontact(
        self, quota_id: int, *, page_size: int | None = None, after: str | None = None
    ) -> AsyncGenerator[str, None]:
        """Yield the member codes of a recontact quota."""
        ...
