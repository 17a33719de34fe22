"""Work in fresh processes, so that no measurement is affected by the imports, garbage or peaks of another."""

from __future__ import annotations

import traceback
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

T = TypeVar("T")


class RemoteError(Exception):
    """A call in another process failed there, or did not end."""


class Remote:
    """An object in its own process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def call(self, method: str, *arguments: Any, limit: float | None = None) -> Any:
        """Call a method of the object and wait for its result, at most this many seconds."""
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(limit):
                raise RemoteError(f"{method}: stopped after {limit:.0f} s")
            failure, result = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RemoteError(f"{method}: its process ended without a result") from None
        if failure:
            raise RemoteError(failure)
        return result


@contextmanager
def remote(make: Callable[..., object], *arguments: Any) -> Iterator[Remote]:
    """Start a process and make an object in it. Both end with the block, after the object's `stop`, if any."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make, arguments))
    process.start()
    theirs.close()
    try:
        yield Remote(ours)
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()


def fresh(function: Callable[..., T], *arguments: Any, limit: float | None = None) -> T:
    """Call a function in a fresh process and return its result."""
    with remote(_Once) as process:
        result: T = process.call("run", function, *arguments, limit=limit)
        return result


class _Once:
    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)


def _serve(pipe: Connection, make: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Make the object, then answer calls until the other end of the pipe is closed."""
    made, failure = None, None
    try:
        made = make(*arguments)
    except Exception as exc:  # noqa: BLE001  told when something is asked of it
        failure = _told(exc)
    with suppress(EOFError, OSError):
        while True:
            method, given = pipe.recv()
            result = None
            if made is not None:
                try:
                    failure, result = None, getattr(made, method)(*given)
                except Exception as exc:  # noqa: BLE001  it is told where the figure is wanted
                    failure = _told(exc)
            pipe.send((failure, result))
    if hasattr(made, "stop"):
        made.stop()


def _told(exc: Exception) -> str:
    """Return a traceback without the paths of this machine."""
    frames = traceback.extract_tb(exc.__traceback__)
    places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    return f"{places}: {type(exc).__name__}: {exc}"
