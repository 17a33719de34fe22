"""The way through an HTTP proxy: CONNECT, and what a proxy means that says no."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import httpx

from sampling_async._answers import Answer
from sampling_async._failures import Refusal
from sampling_async._policy import PASSING
from sampling_async._sockets import received, send_whole

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from sampling_async._configuration import Proxy

UNAUTHORIZED: Final = 407
_OK: Final = range(200, 300)
_WHO: Final = ": give the right user and password in proxy= or SAMPLING_PROXY"
_SAYS: Final = {
    401: _WHO,  # what tinyproxy says of a wrong password
    UNAUTHORIZED: _WHO,
    403: ": it does not let this client, or anybody, go there",
}


class Tunnel:
    """A way through a proxy to a host, which only that host can look into.

    Args:
        proxy: The proxy.
        host: Where to, in ASCII.
        port: Its port.
    """

    __slots__ = ("_proxy", "_target")

    def __init__(self, proxy: Proxy, host: str, port: int) -> None:
        self._proxy = proxy
        self._target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def dig(self, sock: socket.socket) -> None:
        """Ask a proxy, on a connection just opened, for the way; what is sent from then on goes to the host.

        Raises:
            Refusal: It says no, says it otherwise than in HTTP/1.1, or says more than yes.
            OSError: The connection broke.
        """
        lines = [f"CONNECT {self._target} HTTP/1.1", f"Host: {self._target}"]
        lines += [f"{name}: {value}" for name, value in credentials_for(self._proxy).items()]
        await send_whole(sock, "\r\n".join([*lines, "", ""]).encode("ascii"))
        answer, rest = Answer(), b""
        try:
            while not answer.status:  # fed line by line, so that it is known what comes after the head
                rest = rest or await received(sock)
                line, newline, rest = rest.partition(b"\n")
                answer.feed(line + newline)
        except httpx.RemoteProtocolError:
            raise Refusal("the proxy gave no answer in HTTP/1.1") from None
        if answer.status not in _OK:
            raise refusal_of(answer.status)
        if rest:
            raise Refusal("the proxy sent something that only the host could have been asked for")


def credentials_for(proxy: Proxy) -> Mapping[str, str]:
    """Return the headers that let us through a proxy, which nobody else gets to see."""
    return {} if proxy.authorization is None else {"Proxy-Authorization": proxy.authorization.reveal()}


def refusal_of(status: int) -> Refusal:
    """Return what to say of a proxy that answered with a status of its own."""
    text = f"the proxy answered {status}{_SAYS.get(status, '')}; nothing was sent to the service"
    return Refusal(text, permanent=status not in PASSING)
