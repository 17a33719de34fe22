"""A TCP proxy in front of a correct server; it damages the traffic.

`fault_server` decides what is sent; the proxy decides how it travels, as in
`FaultProxy(server.url, cut_at=200)`. Its attributes may be changed during a run and apply from then on.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import wire
from attrs import define, field


@define(eq=False)
class FaultProxy:
    """Forwards connections to a server.

    Attributes:
        upstream: The address of the server.
        cut_at: The number of response bytes after which a connection is ended; None: never.
        cut_how: How it ends: `fin` or `rst`.
        delay: Seconds by which each piece of a response is delayed.
        slice_size: The number of bytes that are forwarded at a time.
        rate: Bytes per second of a response; 0: no limit.
        drop_underscores: Drop headers whose names have underscores, as nginx does unless told otherwise.
    """

    upstream: str
    cut_at: int | None = None
    cut_how: Literal["fin", "rst"] = "fin"
    delay: float = 0.0
    slice_size: int = 65536
    rate: float = 0.0
    drop_underscores: bool = False
    url: str = field(default="", init=False)
    _serving: Any = field(default=None, init=False)

    def __enter__(self) -> Self:
        self._serving = wire.serve(self._forward)
        self.url = self._serving.__enter__().replace("localhost", "127.0.0.1")
        return self

    def __exit__(self, *args: object) -> None:
        self._serving.__exit__(*args)

    def _forward(self, client: wire.Connection) -> None:
        address = urlsplit(self.upstream)
        with socket.create_connection((address.hostname, address.port)) as server:
            answers = threading.Thread(target=self._answers, args=(server, client), daemon=True)
            answers.start()
            try:
                while (request := client.read_request()) is not None:
                    server.sendall(self._without_underscores(request) if self.drop_underscores else request)
            finally:
                with suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)
                answers.join()

    def _answers(self, server: socket.socket, client: wire.Connection) -> None:
        passed, end = 0, socket.SHUT_RDWR
        with suppress(OSError):
            while data := server.recv(self.slice_size):
                time.sleep(self.delay + (len(data) / self.rate if self.rate else 0.0))
                if self.cut_at is not None and passed + len(data) >= self.cut_at:
                    client.send(data[: self.cut_at - passed])
                    if self.cut_how == "rst":
                        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        end = socket.SHUT_RD  # the reset follows when the reading thread closes the socket
                    break
                client.send(data)
                passed += len(data)
        with suppress(OSError):
            client.sock.shutdown(end)

    @staticmethod
    def _without_underscores(request: bytes) -> bytes:
        head, mark, body = request.partition(b"\r\n\r\n")
        return re.sub(rb"\r\n[^:\r\n]*_[^:\r\n]*:[^\r\n]*", b"", head) + mark + body
