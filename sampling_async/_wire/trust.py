"""TLS contexts, with trusted authorities and client certificates; and the alerts with which a server ends TLS.

If a file cannot be used, the message names the file and its variable. The errors of `ssl` do not.
"""

from __future__ import annotations

import os
import re
import ssl
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sampling_async._contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

ABOUT_THE_CLIENT: Final = frozenset(
    {
        "access denied",
        "bad certificate",
        "certificate expired",
        "certificate required",
        "certificate revoked",
        "certificate unknown",
        "handshake failure",
        "unknown ca",
        "unsupported certificate",
    }
)
"""Alerts that end a handshake because of our certificate or its absence. The server has read no request then.

With TLS 1.3 they may arrive after the client's half of the handshake, while the first request is being sent.
"""

PERMANENT: Final = ABOUT_THE_CLIENT | {
    "insufficient security",
    "no application protocol",
    "protocol version",
    "unrecognized name",
}
"""Alerts after which a retry cannot succeed."""

_REASON: Final = re.compile(r"(?:SSLV3|TLSV1|TLSV13)_(?:ALERT_)?(\w+)")
_CERTIFICATE: Final = "give ssl_context= with a certificate, or set SAMPLING_CLIENT_CERT"
_WAYS_OUT: Final = {
    "certificate required": f": it requires a client certificate; {_CERTIFICATE}",
    "handshake failure": f": it may require a client certificate ({_CERTIFICATE}), or another version of TLS",
    "unknown ca": ": it does not know the authority that signed the client certificate",
}


def alert_in(exc: BaseException | None) -> str:
    """Return the name of the TLS alert in an error or its cause, such as `unknown ca`; "" for none.

    The error's context is ignored: it may be the error of another connection.
    """
    while exc is not None:
        # Only the errors that OpenSSL made have a `reason`.
        reason = getattr(exc, "reason", None) if isinstance(exc, ssl.SSLError) else None
        if found := _REASON.fullmatch(reason or ""):
            return found[1].lower().replace("_", " ")
        exc = exc.__cause__
    return ""


def text_of(alert: str) -> str:
    return f"the server ended TLS with the alert {alert!r}{_WAYS_OUT.get(alert, '')}"


_PROTOCOLS: Final = ["http/1.1"]
_GIVEN: Final = "%s, its option or the profile"  # which of them it was, is not known here
_IGNORES_CUTS: Final[int] = getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
_EXPECTED: Final = "expected PEM, not encrypted: a certificate, and its key if it is the client's"


class Unusable(Exception):  # noqa: N818  each caller turns it into another error
    """A file for the TLS context cannot be used. The text names the file and its variable."""


def checked_context(context: ssl.SSLContext) -> ssl.SSLContext:
    if not isinstance(context, ssl.SSLContext) or context.protocol is ssl.PROTOCOL_TLS_SERVER:
        raise InvalidRequestError(
            "ssl_context must be an ssl.SSLContext for clients, such as ssl.create_default_context()"
        )
    return _prepared(context)


def default_context() -> ssl.SSLContext:
    """Return a context that trusts certifi's authorities, or those in SSL_CERT_FILE or SSL_CERT_DIR."""
    variable = next((name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)), "")
    path = os.environ.get(variable, "")
    # `ssl` accepts a missing folder without an error, and then trusts no authority.
    if variable == "SSL_CERT_DIR" and not Path(path).is_dir():
        raise Unusable(f"SSL_CERT_DIR names {path}, which is not a folder")
    context = _used(variable or "certifi", path, partial(_trusting_by_default, variable, path))
    return _prepared(context)


def _trusting_by_default(variable: str, path: str) -> ssl.SSLContext:
    if variable == "SSL_CERT_DIR":
        return ssl.create_default_context(capath=path)
    if not variable:
        import certifi  # noqa: PLC0415  whoever names the authorities does not need it

        path = certifi.where()
    return ssl.create_default_context(cafile=path)


def _prepared(context: ssl.SSLContext) -> ssl.SSLContext:
    """Return a context that offers HTTP/1.1, and takes no cut connection for the end of a response."""
    context.set_alpn_protocols(_PROTOCOLS)
    # Some builds of Python, that of Debian 12 for one, set this option in each context. OpenSSL then reports an
    # ordinary end where the closing alert of TLS is missing, and `suppress_ragged_eofs=False` has no effect.
    context.options &= ~_IGNORES_CUTS
    return context


def context_of_files(ca_file: str | None, client_cert: str | None) -> ssl.SSLContext | None:
    """Return a context from PEM files, or None if no file is given.

    They hold the authorities to trust, in place of all others, and our certificate with its unencrypted key.
    """
    if not (ca_file or client_cert):
        return None
    try:
        given, trusting = _GIVEN % "SAMPLING_CA_FILE", partial(ssl.create_default_context, cafile=ca_file)
        context = _used(given, ca_file, trusting) if ca_file else default_context()
        if client_cert:
            _used(_GIVEN % "SAMPLING_CLIENT_CERT", client_cert, lambda: _identify(context, client_cert))
    except Unusable as exc:
        raise InvalidRequestError(str(exc)) from None
    return context


def _identify(context: ssl.SSLContext, client_cert: str) -> ssl.SSLContext:
    # Without a password, OpenSSL would ask for one on the terminal if the key is encrypted.
    context.load_cert_chain(client_cert, password="")
    return context


def _used(given: str, path: str, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    try:
        return make()
    except ssl.SSLError as exc:
        reason = exc.reason.lower().replace("_", " ") if exc.reason else _EXPECTED
    except OSError as exc:
        reason = exc.strerror or type(exc).__name__
    except ValueError:  # such as "embedded null byte"
        reason = "this system has no such paths"
    raise Unusable(f"{given} names {path}, which cannot be used: {reason}")
