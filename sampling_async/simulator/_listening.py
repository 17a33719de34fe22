"""A socket that a server accepts connections from. It needs no extra."""

from __future__ import annotations

import socket


def listening(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; 0 takes a free port.

    Raises:
        OSError: The port is taken, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol. With the algorithm on,
    # responses take 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException as exc:
        listener.close()
        if isinstance(exc, OSError):
            exc.filename = f"{host}, port {port}"  # the system's text does not say where
        raise
    return listener
