"""A forward proxy on a real socket: CONNECT, absolute form, credentials, and a record of what it saw.

    python tests/proxies/forward_proxy.py http://127.0.0.1:8080

runs one as a program, with a TLS front for that service. It prints a line of JSON and ends when its stdin is
closed.
"""

from __future__ import annotations

import json
import re
import select
import socket
import ssl
import sys
import threading
from base64 import b64encode
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

import trustme
import wire
from attrs import define, field

if TYPE_CHECKING:
    from collections.abc import Iterator

YES = b"HTTP/1.1 200 Connection established\r\n\r\n"


@define(eq=False)
class ForwardProxy:
    """Forwards requests.

    Attributes:
        credentials: The `user:password` that it requires; None: none.
        connect_answer: Its response to CONNECT; it connects only after a 200.
        seen: The heads of the requests made to it.
        tunnelled: All bytes that clients sent through tunnels.
        url: Its address, with the credentials.
    """

    credentials: str | None = None
    connect_answer: bytes = YES
    seen: list[bytes] = field(factory=list)
    tunnelled: bytearray = field(factory=bytearray)
    url: str = ""
    _serving: Any = None

    def __enter__(self) -> Self:
        self._serving = wire.serve(self._converse)
        user = f"{self.credentials}@" if self.credentials else ""
        self.url = self._serving.__enter__().replace("localhost", f"{user}127.0.0.1")
        return self

    def __exit__(self, *args: object) -> None:
        self._serving.__exit__(*args)

    def _converse(self, client: wire.Connection) -> None:
        server: socket.socket | None = None
        try:
            while (request := client.read_request()) is not None:
                head, _, body = request.partition(b"\r\n\r\n")
                self.seen.append(head)
                method, target, _ = head.split(b"\r\n")[0].split(b" ")
                if not self._knows(head):
                    client.send(wire.answer(b"who?", "407 Who", 'Proxy-Authenticate: Basic realm="x"'))
                elif method == b"CONNECT":
                    client.send(self.connect_answer)
                    if not self.connect_answer.startswith(b"HTTP/1.1 2"):
                        return
                    host, _, port = target.decode().rpartition(":")
                    with socket.create_connection((host.strip("[]"), int(port))) as server:
                        _relay(client.sock, server, self.tunnelled)
                    return
                else:
                    url = urlsplit(target.decode())
                    if server is None:
                        server = socket.create_connection((url.hostname, url.port or 80))
                        threading.Thread(target=_pump, args=(server, client.sock), daemon=True).start()
                    head = head.replace(target, f"{url.path}?{url.query}".rstrip("?").encode(), 1)
                    head = re.sub(rb"\r\nproxy-authorization:[^\r\n]*", b"", head, flags=re.IGNORECASE)
                    server.sendall(head + b"\r\n\r\n" + body)
        finally:
            if server is not None:
                with suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)
                server.close()

    def _knows(self, head: bytes) -> bool:
        if self.credentials is None:
            return True
        line = b"proxy-authorization: basic " + b64encode(self.credentials.encode()).lower()
        return line in head.lower()


def _relay(client: socket.socket, server: socket.socket, sent: bytearray | None = None) -> None:
    back = threading.Thread(target=_pump, args=(server, client), daemon=True)
    back.start()
    _pump(client, server, sent)
    back.join()


def _pump(source: socket.socket, sink: socket.socket, seen: bytearray | None = None) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            if seen is not None:
                seen += data
            sink.sendall(data)
    for sock in (source, sink):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def tls_front(upstream: str) -> Iterator[tuple[str, str]]:
    """Put TLS in front of a service; gives the https address and its authority as PEM."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    address = urlsplit(upstream)

    def forward(client: wire.Connection) -> None:
        with socket.create_connection((address.hostname, address.port)) as server:
            other = {client.sock: server, server: client.sock}
            while True:  # in one thread: OpenSSL cannot read and write one connection in two threads
                for source in select.select(list(other), [], [])[0]:
                    if not (data := source.recv(65536)):
                        return
                    other[source].sendall(data)

    with wire.serve(forward, tls=context) as url:
        yield url, authority.cert_pem.bytes().decode()


if __name__ == "__main__":
    with tls_front(sys.argv[1]) as (https, pem), ForwardProxy() as proxy:
        print(json.dumps({"proxy": proxy.url, "https": https, "ca": pem}), flush=True)  # noqa: T201
        sys.stdin.read()
