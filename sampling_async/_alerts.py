"""What a server says when it ends TLS: alerts by name, and what follows from them."""

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
"""Alerts that end a handshake, because of who we are: no request is read before that has ended.

With TLS 1.3 they arrive after the client's half of the handshake, when its first request may be on its way.
"""

PERMANENT: Final = ABOUT_THE_CLIENT | {
    "insufficient security",
    "no application protocol",
    "protocol version",
    "unrecognized name",
}
"""Alerts that trying again does not change."""

_REASON: Final = re.compile(r"(?:SSLV3|TLSV1|TLSV13)_(?:ALERT_)?(\w+)")
_CERTIFICATE: Final = "give ssl_context= with one, or SAMPLING_CLIENT_CERT"
_WAYS_OUT: Final = {
    "certificate required": f": it wants a client certificate, {_CERTIFICATE}",
    "handshake failure": f": it may want a client certificate ({_CERTIFICATE}), or another version of TLS",
    "unknown ca": ": it does not know the authority of the client certificate",
}


def alert_in(exc: BaseException | None) -> str:
    """Return the name of the TLS alert that an error or its cause tells of (`unknown ca`); "" for none.

    Its context may be an error of another connection, which somebody was handling.
    """
    while exc is not None:
        reason = (
            getattr(exc, "reason", None) if isinstance(exc, ssl.SSLError) else None
        )  # only OpenSSL's own has it
        if found := _REASON.fullmatch(reason or ""):
            return found[1].lower().replace("_", " ")
        exc = exc.__cause__
    return ""


def text_of(alert: str) -> str:
    """Return what to say of an alert, with the way out where there is one."""
    return f"the server ended TLS with the alert {alert!r}{_WAYS_OUT.get(alert, '')}"
