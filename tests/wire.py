"""Real sockets: a server whose connections follow a script, and free ports."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator


class Connection:
    """The server's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""

    def read_request(self) -> bytes | None:
        """Read one whole request; None at the end of the connection."""
        try:
            while b"\r\n\r\n" not in self._buffer:
                if not (data := self.sock.recv(65536)):
                    return None
                self._buffer += data
            head, _, rest = self._buffer.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            size = int(length[1]) if length else 0
            while len(rest) < size:
                if not (data := self.sock.recv(65536)):
                    return None
                rest += data
        except OSError:
            return None
        self._buffer = rest[size:]
        return head + b"\r\n\r\n" + rest[:size]

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reset(self) -> None:
        """Reset the connection."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class Silent:
    """A script that reads one request and sends no response.

    Attributes:
        arrived: Set when the request has arrived.
        closed: Set when the client has closed the connection.
    """

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.closed = threading.Event()

    def __call__(self, connection: Connection) -> None:
        connection.read_request()
        self.arrived.set()
        assert connection.read_request() is None
        self.closed.set()


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """Return a complete HTTP response."""
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def bulk_answer(request: bytes) -> bytes:
    """Return a correct response to a bulk invite: no quota is live."""
    quota_ids = json.loads(request.partition(b"\r\n\r\n")[2])["QuotaIDs"]
    items = [{"QuotaID": i, "Invite": None, "ResultCode": 9, "Result": "QUOTA_NOT_LIVE"} for i in quota_ids]
    return answer(json.dumps({"Invites": items}).encode())


@contextmanager
def serve(script: Callable[[Connection], None], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Run `script` for each connection, in its own thread; gives the base address."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_sockets: set[socket.socket] = set()
    threads: list[threading.Thread] = []

    def run(sock: socket.socket) -> None:
        try:
            with tls.wrap_socket(sock, server_side=True) if tls else sock as wrapped:
                open_sockets.add(wrapped)
                script(Connection(wrapped))
        except OSError:
            pass  # the client closed the connection, or the test ended
        finally:
            sock.close()

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            open_sockets.add(sock)
            threads.append(threading.Thread(target=run, args=(sock,), daemon=True))
            threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield f"{'https' if tls else 'http'}://localhost:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for sock in tuple(open_sockets):  # threads add to the list
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        acceptor.join()
        for thread in threads:
            thread.join()


def kept(requests: list[bytes], reply: bytes) -> Callable[[bytes], bytes]:
    """Return a reply for `serve_each` that keeps the requests, as they came."""

    def replied(request: bytes) -> bytes:
        requests.append(request)
        return reply

    return replied


def serve_each(reply: Callable[[bytes], bytes]) -> Callable[[Connection], None]:
    """Return a script that responds to every request of a connection with `reply(request)`."""

    def script(connection: Connection) -> None:
        while (request := connection.read_request()) is not None:
            connection.send(reply(request))

    return script


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
