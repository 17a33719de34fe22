"""Turn the exceptions of a transport into the errors of this package."""

from __future__ import annotations

import ssl
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import httpx

from sampling_async._contract.errors import TransportError, TransportTimeoutError, is_test_failure
from sampling_async._wire.http1 import NotHttp
from sampling_async._wire.trust import PERMANENT, alert_in, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sampling_async._contract.errors import Delivery

LIBRARIES: Final = {"httpx": "httpcore", "httpx2": "httpcore2"}
"""httpx, and what continues it under other maintainers; each with the library that its own engine is in."""

_KNOWING: Final = frozenset({"httpcore", "httpcore2", "builtins", "socket", "ssl"})
# Exceptions of faulty code, such as a hook's: they come again, and say nothing of the service.
_MISTAKES: Final = (TypeError, LookupError, AttributeError, NameError, NotImplementedError, ImportError)
_NOT_ANNOUNCED: Final = "No response can be found for "
_NEVER_SENT: Final = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError")


def is_any(exc: BaseException, *names: str) -> bool:
    """Return whether an exception is of one of these classes, of httpx or httpx2, which need not be loaded."""
    cls: Any = type(exc)
    return not _names_of(cls).isdisjoint(names)


@lru_cache(maxsize=256)
def _names_of(cls: Any) -> frozenset[str]:
    classes: tuple[type, ...] = cls.__mro__
    return frozenset(each.__name__ for each in classes if each.__module__.split(".")[0] in LIBRARIES)


class Refusal(httpx.ConnectError):
    """A failed connection with a reason that our engine knows. Its text quotes nothing from the network."""

    def __init__(self, text: str, *, permanent: bool = False) -> None:
        super().__init__(text)
        self.permanent = permanent


def translated(exc: BaseException, delivery: Delivery, *, sent: bool, way: str = "") -> TransportError:
    """Return our error for an exception of a transport, without any text that may quote the network."""
    name = type(exc).__name__
    if isinstance(exc, Refusal):
        return TransportError(str(exc), delivery=delivery, permanent=exc.permanent)
    if not is_any(exc, "ConnectError", "ConnectTimeout"):
        way = ""
    if is_any(exc, "TimeoutException"):
        return TransportTimeoutError(f"a time limit passed ({name}){way}", delivery=delivery)
    if alert := alert_in(exc):
        return TransportError(text_of(alert), delivery=delivery, permanent=alert in PERMANENT)
    if isinstance(exc, NotHttp):
        return TransportError(
            "the response is not valid HTTP/1.1: is the port right, and http or https?", delivery=delivery
        )
    refused = _certificate_refusal(exc)
    if refused is not None:
        return TransportError(
            f"the TLS certificate was refused: {refused.verify_message}", delivery=delivery, permanent=True
        )
    if not (isinstance(exc, OSError) or is_any(exc, "HTTPError")):
        when = "when the request may have been sent" if sent else "before anything was sent"
        text = f"your transport or http_client raised {name} {when}"
        return TransportError(text, delivery=delivery, permanent=isinstance(exc, _MISTAKES))
    # The system's text for an errno quotes no data. The text of a foreign transport may quote URLs or headers.
    reason = exc.__cause__.strerror if isinstance(exc.__cause__, OSError) else None
    if getattr(exc.__cause__, "reason", None) == "WRONG_VERSION_NUMBER":
        reason = "what answers there does not speak TLS: another port, or an http:// address?"
    detail = f": {reason}" if reason and is_any(exc, "ConnectError") else ""
    what = "the connection was lost after the request was sent" if sent else "no connection"
    return TransportError(f"{what} ({name}{detail}){way}", delivery=delivery)


def failure_of_test(exc: BaseException) -> BaseException | None:
    """Return the failure of a test that a mock has raised, or None if the exception is about the network.

    pytest-httpx raises a timeout for a request that the test has not announced, and explains that in its text.
    """
    is_general = type(exc).__name__ == "TimeoutException" and is_any(exc, "TimeoutException")
    if is_general and str(exc).startswith(_NOT_ANNOUNCED):
        return AssertionError(str(exc))
    return exc if is_test_failure(exc) else None


def way_of(scheme: str, *, has_proxy: bool, environment: Mapping[str, str]) -> str:
    """Return an addition to the message of a failed connection: which proxy was used or not used.

    Other programs find their proxy in `environment`. Its values may hold a password and are not repeated.
    """
    if has_proxy:
        return "; the connection goes through the proxy"
    names = (f"{scheme}_proxy".upper(), f"{scheme}_proxy", "ALL_PROXY", "all_proxy")
    unused = next((name for name in names if environment.get(name)), None)
    return f"; {unused} is set but not used: give proxy= or set SAMPLING_PROXY" if unused else ""


def was_never_sent(exc: BaseException, *, has_connected: bool = True) -> bool:
    """Return whether an error proves that there was no connection, so that nothing was sent.

    Adapters of other libraries also use these error types for connections that were lost after the request. So
    only errors that httpcore or the standard library caused are a proof. One of httpcore may be of another
    request, such as one of an application behind ASGITransport: it is a proof only if this request was seen to
    connect (`has_connected`), or had to wait in the pool.
    """
    cause = "" if exc.__cause__ is None else type(exc.__cause__).__module__.split(".")[0]
    if cause in LIBRARIES.values() and not (has_connected or is_any(exc, "PoolTimeout")):
        return False
    return (not cause or cause in _KNOWING) and is_any(exc, *_NEVER_SENT)


def _certificate_refusal(exc: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while exc is not None and not isinstance(exc, ssl.SSLCertVerificationError):
        exc = exc.__cause__ or exc.__context__
    return exc
