"""What is said of an attempt that failed, from what its transport raised."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

import httpx

from sampling_async._alerts import PERMANENT, alert_in, text_of
from sampling_async._errors import TransportError, TransportTimeoutError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sampling_async._errors import Delivery

_KNOWING: Final = frozenset({"httpcore", "builtins", "socket", "ssl"})
_NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)


class Refusal(httpx.ConnectError):
    """A connection that did not come about for a reason that our engine knows. Its text quotes nothing.

    Args:
        text: The reason.
        permanent: Whether trying again does not change it.
    """

    def __init__(self, text: str, *, permanent: bool = False) -> None:
        super().__init__(text)
        self.permanent = permanent


def translated(exc: BaseException, delivery: Delivery, *, sent: bool, way: str = "") -> TransportError:
    """Return our error for one of a transport, without its text where that may quote the wire.

    Args:
        exc: What the transport raised.
        delivery: What is known about the call's effect.
        sent: Whether bytes of the request may have left.
        way: What else to say of a connection that does not come about, see `way_of`.
    """
    name = type(exc).__name__
    if isinstance(exc, Refusal):
        return TransportError(str(exc), delivery=delivery, permanent=exc.permanent)
    if not isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout):
        way = ""
    if isinstance(exc, httpx.TimeoutException):
        return TransportTimeoutError(f"a time limit passed ({name}){way}", delivery=delivery)
    if alert := alert_in(exc):
        return TransportError(text_of(alert), delivery=delivery, permanent=alert in PERMANENT)
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
    return TransportError(f"{what} ({name}{detail}){way}", delivery=delivery)


def way_of(scheme: str, *, has_proxy: bool, environment: Mapping[str, str]) -> str:
    """Return what to say of the way that a connection of our engine was to take.

    Args:
        scheme: That of the service's address.
        has_proxy: Whether it goes through a proxy.
        environment: Where other programs find the proxy they use. Its values, which may hold a password, are
            not repeated.
    """
    if has_proxy:
        return "; the way is through the proxy"
    names = (f"{scheme}_proxy".upper(), f"{scheme}_proxy", "ALL_PROXY", "all_proxy")
    unused = next((name for name in names if environment.get(name)), None)
    return f"; {unused} is set and not used: give proxy= or SAMPLING_PROXY" if unused else ""


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
