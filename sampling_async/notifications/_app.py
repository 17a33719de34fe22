"""An inbox as an ASGI application without a framework, and who may post to it.

Access depends on secret paths or Basic auth, networks, and trusted proxies.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import shown
from sampling_async.notifications._bodies import MOST_BYTES
from sampling_async.notifications._records import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from ipaddress import IPv4Network

    from sampling_async.notifications._inbox import Inbox

_Network: TypeAlias = "IPv4Network | IPv6Network"
_SHORTEST: Final = 16
_UNIX: Final = "unix"
_UNRESERVED: Final = re.compile(r"[\w.~-]+", re.ASCII)


class AccessControl:
    """Decides whether a hit is accepted, before its body is read or stored.

    Args:
        secrets: The secrets in the paths of each kind; all of a kind are valid.
        basic: Names and passwords of Basic auth, which stand in place of a secret.
        networks: Where hits may come from, such as `"198.51.100.0/24"`; empty: from everywhere.
        trusted_proxies: The networks of the proxies in front, whose X-Forwarded-For is believed; `"unix"` for
            one that connects through a Unix socket, and so has no address.

    Raises:
        InvalidRequestError: A secret or password is too short, or a network is not valid.
    """

    def __init__(
        self,
        secrets: Mapping[Kind, Sequence[str]],
        *,
        basic: Iterable[tuple[str, str]] = (),
        networks: Iterable[str] = (),
        trusted_proxies: Iterable[str] = (),
    ) -> None:
        self._secrets = {
            kind: [_in_a_path(_checked(secret, "secret")).encode() for secret in each]
            for kind, each in secrets.items()
        }
        self._basic = [f"{name}:{_checked(password, 'password')}".encode() for name, password in basic]
        for name, given in (("networks", networks), ("trusted_proxies", trusted_proxies)):
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise InvalidRequestError(
                    f"{name} must be a list of networks, such as ['198.51.100.0/24'], not {shown(given)}"
                )
        self._networks = [_network(text) for text in networks]
        proxies = list(trusted_proxies)
        self._trusts_socket = _UNIX in proxies
        self._proxies = [_network(text) for text in proxies if text != _UNIX]

    def authenticates(self, kind: Kind, secret: str, headers: Iterable[tuple[str, str]]) -> bool:
        """Return whether the secret of a path is one of the kind's, or the headers have a valid password.

        It takes the same time for right and wrong secrets: all are compared, and each one whole.
        """
        given = secret.encode("utf-8", "surrogatepass")
        results = [hmac.compare_digest(given, each) for each in self._secrets.get(kind, ())]
        if self._basic:
            claimed = _credentials(headers)
            results += [hmac.compare_digest(claimed, each) for each in self._basic]
        return any(results)

    def source(self, peer: str, headers: Iterable[tuple[str, str]]) -> str:
        """Return the address that a hit came from.

        X-Forwarded-For is read from its end, and only as far as trusted proxies have written it. What stands
        before could be written by anybody, and is ignored.
        """
        if not self._proxies and not self._trusts_socket:
            return peer
        hops = [hop.strip() for name, value in headers if name == "x-forwarded-for" for hop in value.split(",")]
        while hops and self._is_proxy(peer):
            peer = _without_port(hops.pop())
        return peer

    def _is_proxy(self, peer: str) -> bool:
        # Servers give no address for a Unix socket, or its path.
        is_socket = not peer or peer.startswith(("unix:", "/"))
        return self._trusts_socket if is_socket else _is_in(peer, self._proxies)

    def allows(self, source: str) -> bool:
        """Return whether hits from this address are accepted."""
        return not self._networks or _is_in(source, self._networks)


def _checked(secret: str, what: str) -> str:
    if not isinstance(secret, str) or len(secret) < _SHORTEST:
        raise InvalidRequestError(
            f"a {what} of notifications has at least {_SHORTEST} characters; secrets.token_urlsafe() makes one"
        )
    return secret


def _in_a_path(secret: str) -> str:
    if not _UNRESERVED.fullmatch(secret):
        raise InvalidRequestError(
            "a secret stands in a URL: it has letters, digits and -._~ only; secrets.token_urlsafe() makes one"
        )
    return secret


def _credentials(headers: Iterable[tuple[str, str]]) -> bytes:
    for name, value in headers:
        scheme, _, text = value.partition(" ")
        if name == "authorization" and scheme.casefold() == "basic":
            try:
                return base64.b64decode(text.strip(), validate=True)
            except ValueError:
                return b""
    return b""


def _network(text: str) -> _Network:
    try:
        return ip_network(text)
    except ValueError as exc:
        raise InvalidRequestError(f"{text!r} is no network such as 198.51.100.0/24: {exc}") from None


def _is_in(address: str, networks: Sequence[_Network]) -> bool:
    try:
        parsed: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped:  # how a socket for both families shows IPv4
        parsed = parsed.ipv4_mapped
    return any(parsed in network for network in networks)


def _without_port(hop: str) -> str:
    """Return the address of `198.51.100.7`, `198.51.100.7:1234`, `2001:db8::7` or `[2001:db8::7]:1234`."""
    hop = hop.strip('"')
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop


_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]

_KINDS: Final = frozenset(Kind)
_HIDDEN: Final = "hidden"
_BODY_SECONDS: Final = 30.0
"""How long a body may take to come, so that slow senders do not pile up."""


class NotificationsApp:
    """Takes hits to `/<kind>/<secret>`, or to `/<kind>` with Basic auth, by GET or POST.

    It may be mounted at any path. The secret is checked before the body is read.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Answer one ASGI connection."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:  # a WebSocket, which is refused by closing it
            await send({"type": f"{scope['type']}.close"})

    async def _answer(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        headers = [
            (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        peer = (scope.get("client") or ("",))[0] or ""
        kind, secret = _kind_and_secret(scope["path"])
        query = (scope.get("query_string") or b"").decode("utf-8", "surrogateescape")
        _hide_secrets(scope, kind, secret)
        refusal = self._inbox.refuses(kind, headers, peer, secret=secret)
        if refusal is not None:
            await _send_reply(send, refusal.status, refusal.body)
            return
        if scope["method"] not in ("GET", "POST"):
            await _send_reply(send, 405, b"GET or POST")
            return
        try:
            with anyio.fail_after(_BODY_SECONDS):
                body = await _read_body(receive)
        except TimeoutError:
            await _send_reply(send, 408, b"The body did not come in time")
            return
        if body is None:  # the sender has disconnected, and gets no response
            return
        reply = await self._inbox.receive(kind, body, headers, peer, secret=secret, query=query)
        await _send_reply(send, reply.status, reply.body)


def _kind_and_secret(path: str) -> tuple[str, str]:
    """Return the last two parts of a path; the parts before are the mount point."""
    before, _, last = path.rstrip("/").rpartition("/")
    return (before.rpartition("/")[2], last) if last not in _KINDS else (last, "")


def _hide_secrets(scope: MutableMapping[str, Any], kind: str, secret: str) -> None:
    """Remove the secret, and the query, which may name a member, from what access logs show.

    uvicorn and others read path and query from the scope that they have passed, when the response begins.
    """
    path = scope["path"]
    if kind not in _KINDS:  # the secret may stand anywhere
        path = f"/{_HIDDEN}"
    elif secret:
        path = path.rstrip("/").removesuffix(secret) + _HIDDEN
    scope["path"], scope["raw_path"] = path, path.encode("utf-8", "surrogateescape")
    scope["query_string"] = b""


async def _read_body(receive: _Receive) -> bytes | None:
    """Return the body, of a too large one only the beginning; None if it was cut off."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body") or b""
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES or not message.get("more_body", False):
            return b"".join(parts)


async def _send_reply(send: _Send, status: int, body: bytes) -> None:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", b"%d" % len(body)),
        *([(b"retry-after", b"5")] if status == 503 else []),  # noqa: PLR2004  not stored
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: _Receive, send: _Send) -> None:
    """Confirm startup and shutdown. A program that serves only this opens the inbox around the server."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
