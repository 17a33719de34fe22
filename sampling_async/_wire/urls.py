"""Addresses of services and proxies. They are written as httpx writes them: a journal belongs to an address."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from attrs import field, frozen

_HOST_AND_PORT: Final = re.compile(r"(?:\[(.*:.*)\]|([^:\[\]]*))(?::([0-9]*))?")
_IPV4: Final = re.compile(r"[0-9]+(?:\.[0-9]+){3}")
_SAFE_IN_HOST: Final = "!$&'()*+,;=\"`{}%|\\"
_SAFE_IN_PATH: Final = "!$%&'()*+,/:;=@[\\]^|"
_USUAL_PORTS: Final = {"http": 80, "https": 443}
_LONGEST: Final = 65_536


@frozen(kw_only=True)
class Url:
    """An address, parsed.

    Attributes:
        host: The host as people read it.
        ascii_host: The same as it is sent: in lower case, and in Punycode.
        port: The port; None for the usual one of the scheme.
        path: The path, percent-encoded.
        username, password: Both decoded.
        rest: Whether there is a query or a fragment, be they empty.
    """

    scheme: str
    host: str
    ascii_host: str
    port: int | None
    path: str
    username: str = field(repr=False)
    password: str = field(repr=False)
    has_credentials: bool
    has_rest: bool

    @property
    def netloc(self) -> str:
        """Host and port, as they are sent."""
        host = f"[{self.ascii_host}]" if ":" in self.ascii_host else self.ascii_host
        return host if self.port is None else f"{host}:{self.port}"

    @property
    def origin(self) -> tuple[str, str, int | None]:
        """What decides whether the key is sent."""
        return self.scheme, self.ascii_host, self.port

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.path}"


def parsed(text: str) -> Url:
    """Return an address.

    Raises:
        ValueError: It is not valid. The text of the error may hold a password.
    """
    if len(text) > _LONGEST or any(char.isascii() and not char.isprintable() for char in text):
        raise ValueError("it is too long, or has control characters")
    parts = urlsplit(text)
    userinfo, _, host_and_port = parts.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    split = _HOST_AND_PORT.fullmatch(host_and_port)
    if split is None:
        raise ValueError("host and port are not valid")
    host, port = _encoded(split[1] or split[2]), int(split[3]) if split[3] else None
    return Url(
        scheme=parts.scheme,
        host=_readable(host),
        ascii_host=host,
        port=None if port == _USUAL_PORTS.get(parts.scheme) else port,
        path=quote(parts.path, safe=_SAFE_IN_PATH),
        username=unquote(username),
        password=unquote(password),
        has_credentials=bool(userinfo),
        has_rest="?" in text or "#" in text,
    )


def _encoded(host: str) -> str:
    if _IPV4.fullmatch(host):
        return str(IPv4Address(host))
    if ":" in host:
        IPv6Address(host)
        return host
    if host.isascii():
        return quote(host.lower(), safe=_SAFE_IN_HOST)
    import idna  # noqa: PLC0415  few hosts need it

    return idna.encode(host.lower()).decode("ascii")


def _readable(host: str) -> str:
    if not host.startswith("xn--"):
        return host
    import idna  # noqa: PLC0415  likewise

    return idna.decode(host)
