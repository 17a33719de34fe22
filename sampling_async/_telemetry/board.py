"""Show a client's snapshots to other processes of the same user, over a Unix socket."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import anyio
from attrs import asdict

from sampling_async._json.codec import plain_json
from sampling_async._pacing.standing import Standing
from sampling_async._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from anyio.abc import SocketStream
    from anyio.streams.stapled import MultiListener

    from sampling_async._snapshot import Snapshot

_OWNER_ONLY = 0o600


class SnapshotServer(Standing):
    """A Unix socket that gives one snapshot, as a line of JSON, to each connection: see `serve_snapshots`.

    Only the user that runs the process can connect. A line holds numbers and the host of the service.

    Args:
        path: The path of the socket. If a socket is there, it is replaced.
        host: The host of the service.
        read: Returns the snapshot.
    """

    _called = "snapshot server"

    def __init__(self, path: str | os.PathLike[str], host: str, read: Callable[[], Snapshot]) -> None:
        super().__init__()
        self._path = os.fspath(path)
        self._host = host
        self._read = read
        self._listener: MultiListener[SocketStream] | Any = None

    async def __aenter__(self) -> Self:
        self._listener = await anyio.create_unix_listener(self._path, mode=_OWNER_ONLY)
        try:
            return await super().__aenter__()
        except BaseException:
            await self._end_listening()
            raise

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(exc_type, exc, traceback)
        finally:
            await self._end_listening()

    async def _end_listening(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._listener.aclose()
        with suppress(OSError):
            os.unlink(self._path)  # noqa: PTH108  one call to the system

    async def _work(self) -> None:
        await self._listener.serve(self._tell)

    async def _tell(self, stream: SocketStream) -> None:
        # A reader that goes away, or reads nothing, is its own affair.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError), anyio.move_on_after(1.0):
            async with stream:
                await stream.send(self._line())

    def _line(self) -> bytes:
        line = {"pid": os.getpid(), "version": __version__, "host": self._host, **asdict(self._read())}
        return plain_json(line) + b"\n"
