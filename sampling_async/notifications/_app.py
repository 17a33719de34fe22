"""An inbox as an ASGI application, without a framework."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attrs import frozen

from sampling_async._pacing.blocks import DeadlineScopes
from sampling_async._pacing.loops import running_loop
from sampling_async.notifications._bodies import MOST_BYTES
from sampling_async.notifications._records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Headers: TypeAlias = "Mapping[str, str] | Iterable[tuple[str, str]]"
"""The headers of a hit, names in any case."""

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]

_KINDS: Final = frozenset(Kind)
_HIDDEN: Final = "hidden"
_BODY_SECONDS: Final = 30.0  # how long a body may take to come, so that slow senders do not pile up


@frozen
class HitResponse:
    """The response to a hit: an HTTP status, and a short text."""

    status: int
    body: bytes


@frozen
class Admission:
    """The permission to post a hit: its kind, its headers as they are stored, and where it came from."""

    kind: Kind
    headers: Sequence[tuple[str, str]]
    source: str


_Admit: TypeAlias = "Callable[[str, Sequence[tuple[str, str]], str, str], Admission | HitResponse]"
_Keep: TypeAlias = "Callable[[Admission, bytes, str], Awaitable[HitResponse]]"


class NotificationsApp:
    """Takes hits to `/<kind>/<secret>`, or to `/<kind>` with Basic auth, by GET or POST.

    It may be mounted at any path. The secret is checked before the body is read.
    """

    def __init__(self, admit: _Admit, keep: _Keep) -> None:
        self._admit = admit
        self._keep = keep
        self._deadlines: tuple[object, DeadlineScopes] = (None, DeadlineScopes())

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
        admission = self._admit(kind, headers, peer, secret)
        if isinstance(admission, HitResponse):
            await _send_reply(send, admission.status, admission.body)
            return
        if scope["method"] not in ("GET", "POST"):
            await _send_reply(send, 405, b"GET or POST")
            return
        body = None
        with self._deadlines_here().within(_BODY_SECONDS, is_ours=True) as block:
            body = await _read_body(receive)
        if block.cancelled_caught:
            await _send_reply(send, 408, b"The body did not come in time")
            return
        if body is None:  # the sender has disconnected, and gets no response
            return
        reply = await self._keep(admission, body, query)
        await _send_reply(send, reply.status, reply.body)

    def _deadlines_here(self) -> DeadlineScopes:
        """Return the deadlines of the event loop that runs. A timer for each hit takes seven times as long."""
        # One pair, because event loops of other threads may serve the same app.
        loop, deadlines = self._deadlines
        if loop is not (here := running_loop()):
            deadlines = DeadlineScopes()
            self._deadlines = here, deadlines
        return deadlines


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
