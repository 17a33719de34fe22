"""What a client may be configured with: an address the key can be sent to, Guids, and the key as a secret."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, NoReturn

import httpx

from sampling_async._errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

_GUID: Final = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"


class Secret:
    """A text that shows in no repr, str, vars, pickle or traceback; only `reveal()` gives it."""

    __slots__ = ("reveal",)

    def __init__(self, text: str) -> None:
        self.reveal: Callable[[], str] = lambda: text

    @classmethod
    def of(cls, value: object) -> Secret:
        """Return a value's text as a secret, or the value itself if it is one."""
        return value if isinstance(value, Secret) else cls(str(value))

    def matches(self, pattern: str) -> bool:
        """Return whether the whole text matches a regular expression."""
        return re.fullmatch(pattern, self.reveal()) is not None

    def __repr__(self) -> str:
        return "<secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be pickled or copied")


def guid_of(value: str | UUID | Secret, name: str) -> Secret:
    """Return a Guid, as something that does not show it.

    Raises:
        InvalidRequestError: It is not one. Neither the text nor the frames of the traceback hold the value.
    """
    secret = Secret.of(value)
    del value
    if not secret.matches(_GUID):
        raise InvalidRequestError(
            f"{name} is not a Guid: expected 8-4-4-4-12 hexadecimal digits, without blanks, quotes or braces"
        )
    return secret


def base_url_of(value: str, *, allow_http: bool) -> httpx.URL:
    """Return the service's base address.

    Raises:
        InvalidRequestError: It is not an https address (http for loopback or with allow_http), or it has a
            user, a query, a fragment or dot segments. The text does not repeat it: it may hold a password.
    """
    try:
        url = httpx.URL(value.rstrip("/"))
        host = url.host
    except (httpx.InvalidURL, AttributeError, TypeError, ValueError):  # ValueError: of idna
        url, host = httpx.URL(""), ""
    if url.scheme not in {"http", "https"} or not host:
        raise InvalidRequestError("base_url is an address like https://host or https://host/path")
    if url.userinfo or url.query or url.fragment or "?" in value or "#" in value:
        raise InvalidRequestError("base_url takes no user, password, query or fragment")
    if {".", ".."} & set(value.split("/")):
        raise InvalidRequestError("base_url takes no '.' or '..' segments")
    if url.scheme == "http" and not (allow_http or _is_loopback(host)):
        raise InvalidRequestError(
            "base_url must be https, or the key travels in the clear; allow_http=True where that is accepted"
        )
    return url


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
