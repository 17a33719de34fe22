"""Connections through an HTTP proxy: CONNECT, and the errors for a proxy that refuses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import httpx

from sampling_async._contract.statuses import FORBIDDEN, Meaning, statuses
from sampling_async._wire.failures import Refusal
from sampling_async._wire.http1 import ResponseParser
from sampling_async._wire.sockets import received, send_whole

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from sampling_async._wire.address import Proxy

UNAUTHORIZED: Final = 407
# A client ignores these in a successful answer to CONNECT (RFC 9110 9.3.6), and reads no body of another one.
_FRAMING: Final = re.compile(rb"(?:content-length|transfer-encoding):", re.IGNORECASE)
_LINE_BYTES: Final = 2**16
_OK: Final = range(200, 300)
_PASSING: Final = statuses(Meaning.PASSING)
_WHO: Final = ": check the user and password in proxy= or SAMPLING_PROXY"
_SAYS: Final = {
    401: _WHO,  # tinyproxy's status for a wrong password
    UNAUTHORIZED: _WHO,
    FORBIDDEN: ": it does not allow connections to this host, for this client or for any",
}


class Tunnel:
    """A tunnel through a proxy to a host. The proxy cannot read what TLS sends through it."""

    def __init__(self, proxy: Proxy, host: str, port: int) -> None:
        self._proxy = proxy
        self._target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def dig(self, sock: socket.socket) -> None:
        """Send CONNECT on a new connection to the proxy. After that, all bytes go to the host."""
        lines = [f"CONNECT {self._target} HTTP/1.1", f"Host: {self._target}"]
        lines += [f"{name}: {value}" for name, value in credentials_for(self._proxy).items()]
        await send_whole(sock, "\r\n".join([*lines, "", ""]).encode("ascii"))
        answer, rest, is_left_out = ResponseParser(), b"", False
        try:
            # Feed line by line, so that `rest` has exactly the bytes after the head.
            while not answer.status:
                line, rest = await _line(sock, rest)
                is_left_out = bool(_FRAMING.match(line)) or (is_left_out and line.startswith((b" ", b"\t")))
                if not is_left_out:
                    answer.feed(line)
        except httpx.RemoteProtocolError:
            raise Refusal("the proxy did not respond in HTTP/1.1") from None
        finally:
            answer.let_go()
        if answer.status not in _OK:
            raise refusal_of(answer.status)
        if rest:
            raise Refusal("the proxy sent bytes after its response, before anything was sent to the host")


async def _line(sock: socket.socket, begun: bytes) -> tuple[bytes, bytes]:
    """Return the next line of a head with its end, and what came after it.

    Without an end it is the last, or too long.
    """
    line = b""
    while True:
        data = begun or await received(sock)
        start, newline, begun = data.partition(b"\n")
        line += start + newline
        if newline or not data or len(line) > _LINE_BYTES:
            return line, begun


def credentials_for(proxy: Proxy) -> Mapping[str, str]:
    """Return the headers with the proxy's credentials. They are sent to the proxy only."""
    return {} if proxy.authorization is None else {"Proxy-Authorization": proxy.authorization.reveal()}


def refusal_of(status: int) -> Refusal:
    text = f"the proxy answered {status}{_SAYS.get(status, '')}; nothing was sent to the service"
    return Refusal(text, permanent=status not in _PASSING)
