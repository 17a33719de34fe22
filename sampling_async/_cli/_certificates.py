"""The dates of a certificate, read from its DER form.

`ssl` has no function that reads a certificate which it does not verify itself, such as the user's own. The
dates stand at a fixed place (RFC 5280, 4.1), so a few lines find them, and no library for certificates is
needed.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import Final

from attrs import frozen

_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_BEFORE_VALIDITY: Final = 3  # the serial number, the algorithm and the issuer
_LONG: Final = 0x80
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@frozen
class Validity:
    """From when to when a certificate is valid."""

    begins: datetime
    ends: datetime


def validity_of(der: bytes) -> Validity:
    """Return the dates of a certificate.

    Raises:
        ValueError: The bytes are no certificate.
    """
    try:
        certificate, _ = _content(der, _SEQUENCE)
        signed, _ = _content(certificate, _SEQUENCE)
        if signed[0] == _VERSION:
            _, signed = _content(signed, _VERSION)
        for _ in range(_BEFORE_VALIDITY):
            _, signed = _content(signed, signed[0])
        dates, _ = _content(signed, _SEQUENCE)
        begins, rest = _content(dates, dates[0])
        ends, _ = _content(rest, rest[0])
        return Validity(_time(dates[0], begins), _time(rest[0], ends))
    except (IndexError, ValueError):
        raise ValueError("these bytes are no certificate in DER") from None


def first_in_pem(text: str) -> bytes:
    """Return the first certificate of a PEM file in DER.

    Raises:
        ValueError: There is none.
    """
    found = _PEM.search(text)
    if found is None:
        raise ValueError("this text holds no certificate in PEM")
    return ssl.PEM_cert_to_DER_cert(found[0])


def _content(data: bytes, tag: int) -> tuple[bytes, bytes]:
    """Return the content of the first element, and the bytes after it."""
    if data[0] != tag:
        raise ValueError
    length, start = data[1], 2
    # Example: 0x82 0x01 0x0A says that two bytes give the length, 266.
    if length >= _LONG:
        start += length - _LONG
        length = int.from_bytes(data[2:start], "big")
    if start + length > len(data):
        raise ValueError
    return data[start : start + length], data[start + length :]


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    # UTCTime has a year of two digits: 50 to 99 are of the last century.
    if tag == _UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
