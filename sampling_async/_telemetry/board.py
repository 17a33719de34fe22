"""Show a client's snapshots to other processes of the same user, over a Unix socket."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

import anyio
from attrs import asdict

from sampling_async._json.codec import plain_json
from sampling_async._pacing.standing import Standing
from sampling_async._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from anyio.abc import SocketStream

    from sampling_async._snapshot import Snapshot

_OWNER_ONLY: Final = 0o600
_PAUSE: Final = 1.0
_PATIENCE: Final = 1.0  # with one reader
logger: Final = logging.getLogger("sampling_async.telemetry")


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
        self._path = os.path.abspath(os.fspath(path))  # noqa: PTH100  the host may change its folder
        self._made: tuple[int, int] | None = None  # the socket's device and inode
        self._host = host
        self._read = read
        self._listener: Any = None

    async def __aenter__(self) -> Self:
        self._listener = await anyio.create_unix_listener(self._path, mode=_OWNER_ONLY)
        try:
            self._made = _identity(self._path)
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
            # Another server, or a file of the host, may be in its place by now.
            if _identity(self._path) == self._made:
                os.unlink(self._path)  # noqa: PTH108  one call to the system

    async def _work(self) -> None:
        # Whoever looks must harm nobody: no failure in here ends the block of the host.
        is_told = False
        async with anyio.create_task_group() as readers:
            while True:
                try:
                    stream = await self._listener.accept()
                except anyio.ClosedResourceError:
                    return
                except (OSError, anyio.BrokenResourceError):
                    # The process has no descriptors left, for example.
                    if not is_told:
                        logger.warning(
                            "the snapshot server cannot accept connections; it tries again each second"
                        )
                    is_told = True
                    await anyio.sleep(_PAUSE)
                else:
                    is_told = False
                    readers.start_soon(self._tell, stream)

    async def _tell(self, stream: SocketStream) -> None:
        # A reader that goes away, or reads nothing, is its own affair.
        with anyio.move_on_after(_PATIENCE):
            try:
                async with stream:
                    await stream.send(self._line())
            except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass
            except Exception:
                logger.exception("a snapshot could not be shown")

    def _line(self) -> bytes:
        line = {"pid": os.getpid(), "version": __version__, "host": self._host, **asdict(self._read())}
        return plain_json(line) + b"\n"


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path, follow_symlinks=False)  # noqa: PTH116  as above
    return found.st_dev, found.st_ino
