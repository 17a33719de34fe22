"""Look up the addresses of a host, without the application's thread pool, which may be busy."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Any, TypeAlias

from sampling_async._pacing.threads import start
from sampling_async._wire.forks import forks

if TYPE_CHECKING:
    from sampling_async._pacing.threads import Run

Addresses: TypeAlias = list[tuple[int, tuple[Any, ...]]]
"""Pairs of address family and the argument for `socket.connect`, in the resolver's order of preference."""


class Lookups:
    """The lookups of one event loop. Tasks that need the same host at the same time share one lookup."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, str, int], Run[Addresses | OSError]] = {}

    async def addresses(self, host: str, port: int) -> Addresses:
        """Return the addresses of a host. An IP address needs no lookup."""
        try:
            return _found(host, port, socket.AI_NUMERICHOST)
        except socket.gaierror:  # a name, not an IP address
            pass
        run = self._run(host, port)
        # A cancellation here does not end the lookup: other tasks may wait for it.
        await run.over.wait()
        found = run.result()
        if isinstance(found, OSError):
            # A new exception for each task. A shared one would collect the traceback of every task.
            raise type(found)(*found.args)
        return found

    def _run(self, host: str, port: int) -> Run[Addresses | OSError]:
        # With the fork count: the thread of a lookup that began before a fork does not exist in the child.
        key = forks.count, host, port
        run = self._under_way.get(key)
        if run is None or run.over.is_set():
            try:
                run = self._under_way[key] = start(_looked_up, host, port)
            except RuntimeError as exc:
                raise OSError(errno.EAGAIN, "no thread could be started to look up the host name") from exc
        return run


def _looked_up(host: str, port: int) -> Addresses | OSError:
    try:
        return _found(host, port)
    except OSError as exc:
        return exc


def _found(host: str, port: int, flags: int = 0) -> Addresses:
    # As bytes: httpx has encoded the name already, and Python would encode a str again, by an older rule.
    found = socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]
