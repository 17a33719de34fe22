"""Ports that stay free until they are used, although other tests run at the same time."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a free port that the system gives to nobody who asks for any port: it gives higher ones."""
    chosen = random.SystemRandom()
    while True:
        port = chosen.randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
