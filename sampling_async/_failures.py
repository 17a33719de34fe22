"""What is said of an attempt that failed, from what its transport raised."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

import httpx

from sampling_async._errors import TransportError, TransportTimeoutError

if TYPE_CHECKING:
    from sampling_async._errors import Delivery

_KNOWING: Final = frozenset({"httpcore", "builtins", "socket", "ssl"})
_NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)


def translated(exc: BaseException, delivery: Delivery, *, sent: bool) -> TransportError:
    """Return our error for one of a transport, without its text where that may quote the wire."""
    name = type(exc).__name__
    if isinstance(exc, httpx.TimeoutException):
        return TransportTimeoutError(f"a time limit passed ({name})", delivery=delivery)
    refused = _certificate_refusal(exc)
    if refused is not None:
        return TransportError(
            f"the TLS certificate was refused: {refused.verify_message}",
            delivery=delivery,
            permanent=True,
        )
    # What the system says quotes nothing of ours; the text of somebody's transport may.
    reason = exc.__cause__.strerror if isinstance(exc.__cause__, OSError) else None
    detail = f": {reason}" if reason and isinstance(exc, httpx.ConnectError) else ""
    what = "the connection was lost after the request was sent" if sent else "no connection"
    return TransportError(f"{what} ({name}{detail})", delivery=delivery)


def was_never_sent(exc: BaseException) -> bool:
    """Return whether an error says that no connection came about, and comes from who knows.

    Adapters of other libraries give these names also to connections that are lost after the request.
    """
    knows = exc.__cause__ is None or type(exc.__cause__).__module__.split(".")[0] in _KNOWING
    return knows and isinstance(exc, _NEVER_SENT)


def _certificate_refusal(exc: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while exc is not None and not isinstance(exc, ssl.SSLCertVerificationError):
        exc = exc.__cause__ or exc.__context__
    return exc
