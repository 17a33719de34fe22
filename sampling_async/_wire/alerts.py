"""The alerts with which a server ends TLS: their names and their meaning."""

from __future__ import annotations

import re
import ssl
from typing import Final

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
    """Return a message for an alert, with a remedy if there is one."""
    return f"the server ended TLS with the alert {alert!r}{_WAYS_OUT.get(alert, '')}"
