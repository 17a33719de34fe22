"""Which addresses a host has: found without the host application's threads, which may all be busy."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Any, TypeAlias

from sampling_async._forks import forks
from sampling_async._threads import begun

if TYPE_CHECKING:
    from sampling_async._threads import Run

Addresses: TypeAlias = list[tuple[int, tuple[Any, ...]]]
"""Families and what `connect` takes, the resolver's first choice first."""


class Lookups:
    """The lookups of one event loop. Those of one host under way at the same moment are one."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, str, int], Run[Addresses | OSError]] = {}

    async def addresses(self, host: str, port: int) -> Addresses:
        """Return the addresses of a host, or of a number, which needs no lookup.

        Raises:
            OSError: There are none.
        """
        try:
            return _found(host, port, socket.AI_NUMERICHOST)
        except socket.gaierror:  # it is a name
            pass
        run = self._run(host, port)
        await run.over.wait()  # its thread goes on when this is cancelled: others may wait for it
        found = run.result()
        if isinstance(found, OSError):
            raise type(found)(
                *found.args
            )  # a new one: each waiter's traceback would grow in one that is shared
        return found

    def _run(self, host: str, port: int) -> Run[Addresses | OSError]:
        key = forks.count, host, port  # a thread that was looking it up is not in the child of a fork
        run = self._under_way.get(key)
        if run is None or run.over.is_set():
            try:
                run = self._under_way[key] = begun(_looked_up, host, port)
            except RuntimeError as exc:
                raise OSError(errno.EAGAIN, "no thread could be started to look the host up") from exc
        return run


def _looked_up(host: str, port: int) -> Addresses | OSError:
    try:
        return _found(host, port)
    except OSError as exc:
        return exc


def _found(host: str, port: int, flags: int = 0) -> Addresses:
    # In ASCII, as httpx has it; given a text, Python would encode it once more, by an older rule.
    found = socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]
