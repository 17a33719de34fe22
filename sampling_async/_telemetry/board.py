"""Show a client's snapshots to other processes of the same user, over a Unix socket."""

from __future__ import annotations

import logging
import os
import socket
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

import anyio
from attrs import asdict

from sampling_async._contract.checks import file_path
from sampling_async._json.converter import plain_json
from sampling_async._pacing.background import BackgroundService
from sampling_async._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from sampling_async._snapshot import Snapshot

_OWNER_ONLY: Final = 0o600
_PAUSE: Final = 1.0
_PATIENCE: Final = 1.0  # with one reader
logger: Final = logging.getLogger("sampling_async.telemetry")


class SnapshotServer(BackgroundService):
    """A Unix socket that gives one snapshot, as a line of JSON, to each connection: see `serve_snapshots`.

    Only the user that runs the process can connect. A line holds numbers, the host of the service
    and the name of the client.
    """

    _called = "snapshot server"

    def __init__(
        self, path: str | os.PathLike[str], host: str, name: str | None, read: Callable[[], Snapshot]
    ) -> None:
        super().__init__()
        self._path = os.path.abspath(file_path(path, "path"))  # noqa: PTH100  the host may change its folder
        self._made: tuple[int, int] | None = None  # the socket's device and inode
        self._host, self._name = host, name
        self._read = read
        self._listener: socket.socket

    async def __aenter__(self) -> Self:
        # Without an await: a cancellation in between would leave a socket behind that nobody listens on.
        self._listener = _listening(self._path)
        try:
            self._made = _identity(self._path)
            return await super().__aenter__()
        except BaseException:
            self._end_listening()
            raise

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.must_be_outside()
        try:
            await super().__aexit__(exc_type, exc, traceback)
        finally:
            self._end_listening()

    def _end_listening(self) -> None:
        self._listener.close()
        with suppress(OSError):
            # Another server, or a file of the host, may be in its place by now.
            if _identity(self._path) == self._made:
                os.unlink(self._path)  # noqa: PTH108  one call to the system

    async def _work(self) -> None:
        # Whoever looks must harm nobody: no failure in here ends the block of the host.
        is_told = False
        async with anyio.create_task_group() as readers:
            while True:
                await anyio.wait_readable(self._listener)
                try:
                    reader = self._accepted()
                except BlockingIOError:  # who asked has gone away again
                    continue
                except OSError:
                    # The process has no descriptors left, for example.
                    if not is_told:
                        logger.warning(
                            "the snapshot server cannot accept connections; it tries again each second"
                        )
                    is_told = True
                    await anyio.sleep(_PAUSE)
                else:
                    is_told = False
                    readers.start_soon(self._tell, reader)

    def _accepted(self) -> socket.socket:
        reader, _ = self._listener.accept()
        reader.setblocking(False)
        return reader

    async def _tell(self, reader: socket.socket) -> None:
        # A reader that goes away, or reads nothing, is its own affair.
        with reader, anyio.move_on_after(_PATIENCE):
            try:
                known = {"pid": os.getpid(), "version": __version__, "host": self._host, "name": self._name}
                left = plain_json({**known, **asdict(self._read())}) + b"\n"
                while left:
                    await anyio.wait_writable(reader)
                    left = left[reader.send(left) :]
            except OSError:
                pass
            except Exception:
                logger.exception("a snapshot could not be shown")


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path, follow_symlinks=False)  # noqa: PTH116  as above
    return found.st_dev, found.st_ino


def _listening(path: str) -> socket.socket:
    """Return a socket that listens, in the place of another one that may be there."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode):  # noqa: PTH116  one call to the system
            os.unlink(path)  # noqa: PTH108  as above
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        listener.bind(path)
        os.chmod(path, _OWNER_ONLY)  # noqa: PTH101  as above
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener
