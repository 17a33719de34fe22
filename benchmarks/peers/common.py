"""The interface of a client that the scoreboard measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence
    from types import TracebackType

    import httpx


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a service, with the panel and the key."""

    url: str
    panel_guid: str
    api_key: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client reports about one quota ID of one member, in the terms of `Ledger.check`."""

    member_code: str
    quota_id: int
    status: str
    url: str | None = None

    @property
    def invite(self) -> Outcome | None:
        """The invite, for the check: an object with a `url`."""
        return self if self.url is not None else None


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a client. None means the client's own default.

    Attributes:
        concurrency: The number of requests at the same time.
        read: The read timeout in seconds; None for the client's own.
        patience: The longest time of an attempt in seconds, for a client with such a limit.
        backoff: The scale of the waits between attempts; None for the client's own.
        transport: An httpx transport that is used instead of sockets.
        proxy: The address of an HTTP proxy.
        authority: The certificate of an authority to trust, as PEM; None for the usual authorities.
        journal: The path of a journal, for a client that has journals.
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
    """A client that is measured: an async context manager."""

    def __init__(self, address: Address, options: Options) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def invite_all(self, requests: Iterable[tuple[str, Sequence[int]]]) -> list[Outcome]:
        """Request invites of members, each to its own quota IDs, and return all outcomes."""
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
