"""Check the client's configuration: the service's address, the proxy, Guids, headers and secrets."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from ipaddress import ip_address
from math import inf
from typing import TYPE_CHECKING, Any, Final, NoReturn

import httpx

from sampling_async._contract.checks import number_from_0, shown, text_of
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from sampling_async._contract.checks import Text

KEY_HEADER: Final = "API_AUTH_KEY"
USER_AGENT: Final = f"sampling-async/{__version__}"
_LAST_PORT: Final = 65_535
_HTTP_PORT: Final = 80
_HOST: Final = r"[0-9A-Za-z._-]+|[0-9a-fA-F:.]+"
_GUID: Final = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"


class Secret:
    """A text that no repr, str, vars, pickle or traceback shows. Only `reveal()` returns it."""

    __slots__ = ("reveal",)

    def __init__(self, text: str) -> None:
        # The text is in a closure. As an attribute, tools that print the attributes of objects would show it.
        self.reveal: Callable[[], str] = lambda: text

    @classmethod
    def of(cls, value: Text | Secret | None) -> Secret:
        return value if isinstance(value, Secret) else cls(str(text_of(value)))

    def matches(self, pattern: str) -> bool:
        return re.fullmatch(pattern, self.reveal()) is not None

    def __repr__(self) -> str:
        return "<secret>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be pickled or copied")


def hide_secrets(options: dict[str, Any]) -> None:
    """Change arguments of a client so that no error report about a frame that has them shows a secret."""
    for name in ("api_key", "proxy"):
        if options.get(name):
            options[name] = Secret.of(options[name])
    if "headers" in options:
        options["headers"] = hidden_headers(options["headers"])


def hidden_headers(headers: Any) -> Any:
    """Return headers with their values as secrets, empty ones for what is no text.

    Of what is no mapping, return the name of its class.
    """
    if not isinstance(headers, Mapping):
        return None if headers is None else type(headers).__name__
    return {text_of(name): Secret.of(text if _is_text(text) else "") for name, text in headers.items()}


def _is_text(value: object) -> bool:
    return isinstance(value, Secret) or isinstance(text_of(value), str)


_OWN_PORT: Final = r"^(https:.*):(?:0*443)?$|^(http:.*):(?:0*80)?$"


def guid_of(value: Text | Secret, name: str) -> Secret:
    """Return a Guid as a secret. Neither an error's message nor its traceback holds the value."""
    secret = Secret.of(value)
    # Deleted before the error is raised: error reports may show the local variables of this frame.
    del value
    if not secret.matches(_GUID):
        raise InvalidRequestError(
            f"{name} must be a Guid: 8-4-4-4-12 hexadecimal digits, without blanks, quotes or braces"
        )
    return secret


def _parsed(text: str) -> httpx.URL | None:
    """Return an address; None if it is not valid. The errors of httpx quote it, and it may hold a password."""
    try:
        url = httpx.URL(text)
        host = url.host  # decoded here, so it may be found wrong here
    except (httpx.InvalidURL, ValueError):
        return None
    return url if host else None


def comparable(url: str) -> str:
    """Return an address as it is compared: scheme and host in small letters, without the scheme's own port."""
    origin = re.match(r"[^/?#]*://[^/?#]*", url)
    if origin is None:
        return url
    return re.sub(_OWN_PORT, r"\1\2", origin[0].lower()) + url[origin.end() :]


def base_url_of(value: Text, *, allow_http: bool) -> httpx.URL:
    """Return the service's base address: https, or http for loopback or with `allow_http`.

    No error repeats it: it may hold a password.
    """
    text = text_of(value)
    url = _parsed(comparable(text.rstrip("/"))) if isinstance(text, str) else None
    if url is None or url.scheme not in {"http", "https"}:
        raise InvalidRequestError("base_url must be an address like https://host or https://host/path")
    if url.userinfo or "?" in text or "#" in text:
        raise InvalidRequestError("base_url takes no user, password, query or fragment")
    if not _has_port(url):
        raise InvalidRequestError(f"base_url has a port that does not exist: ports are 1 to {_LAST_PORT}")
    if {".", ".."} & set(text.split("/")):
        raise InvalidRequestError("base_url takes no '.' or '..' segments")
    if url.scheme == "http" and not (allow_http or is_loopback(url.host)):
        raise InvalidRequestError(
            "base_url must be https, because http sends the key unencrypted; give allow_http=True to accept "
            "that"
        )
    return url


class Proxy:
    """An HTTP proxy, with the value of its Proxy-Authorization header. Its repr shows no credentials."""

    __slots__ = ("authorization", "host", "port")

    def __init__(self, host: str, port: int, authorization: Secret | None) -> None:
        self.host = host
        self.port = port
        self.authorization = authorization

    @property
    def is_loopback(self) -> bool:
        """Whether the proxy runs on this machine, so that nothing sent to it crosses a network."""
        return is_loopback(self.host)

    def __repr__(self) -> str:
        return f"<Proxy {self.host}:{self.port}>"


def proxy_of(value: Text | Secret) -> Proxy:
    """Return the proxy for an address.

    Neither an error's message nor its traceback holds it: it may have a password.
    """
    found = _proxy_or_problem(Secret.of(value))
    del value
    if isinstance(found, str):
        raise InvalidRequestError(f"proxy (SAMPLING_PROXY) {found}")
    return found


def _proxy_or_problem(secret: Secret) -> Proxy | str:
    """Return the proxy, or the text of the problem: a traceback would show this frame, with the password."""
    url, has_rest = _parsed(secret.reveal()), bool({"?", "#"} & {*secret.reveal()})
    if url is not None and url.scheme in {"https", "socks4", "socks5", "socks5h"}:
        return f"must be an http:// address: {url.scheme} proxies are not supported"
    host = "" if url is None else url.raw_host.decode("ascii")
    if url is None or url.scheme != "http" or not re.fullmatch(_HOST, host):
        return (
            "must be an address like http://host:3128 or http://user:password@host:3128, with special "
            "characters of user and password percent-encoded"
        )
    if url.path != "/" or has_rest:
        return "takes no path, query or fragment; percent-encode the characters / ? # in a password"
    if not _has_port(url):
        return f"has a port that does not exist: ports are 1 to {_LAST_PORT}"
    if ":" in url.username:
        return "takes no user name with a colon"
    if not url.userinfo:
        return Proxy(host, url.port or _HTTP_PORT, None)
    basic = Secret(f"Basic {b64encode(f'{url.username}:{url.password}'.encode()).decode()}")
    return Proxy(host, url.port or _HTTP_PORT, basic)


def _has_port(url: httpx.URL) -> bool:
    """Return whether the port of a URL exists, if it names one. The system would take it modulo 65,536."""
    return url.port is None or 0 < url.port <= _LAST_PORT


def require_https_through(proxy: Proxy, base_url: httpx.URL, *, allow_http: bool) -> None:
    """Refuse to send the key unencrypted, to an http address, through a proxy on another machine."""
    if base_url.scheme == "http" and not (allow_http or proxy.is_loopback):
        raise InvalidRequestError(
            "base_url must be https with this proxy, because http sends the key to it unencrypted; give "
            "allow_http=True to accept that"
        )


def idle_seconds_of(value: float) -> float:
    seconds = number_from_0(value, "idle_seconds", "a number of seconds")
    if seconds == inf:
        raise InvalidRequestError("idle_seconds must be a finite number of seconds, not inf")
    return seconds


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class KeyHeader:
    """The API_AUTH_KEY header, for requests to the origin of the service only. An empty key is not sent.

    It is added at the lowest level, below all parts of other libraries that log, redirect or put requests into
    exceptions.
    """

    def __init__(self, home: httpx.URL, key: Secret) -> None:
        self._home = home
        self._key = key

    def line_for(self, url: httpx.URL) -> bytes:
        """Return the header as a line of HTTP/1.1; nothing for another origin."""
        key = self._key.reveal() if self.is_home(url) else ""
        return f"{KEY_HEADER}: {key}\r\n".encode("ascii") if key else b""

    def added_to(self, headers: Any, url: Any) -> list[tuple[str, str]]:
        """Return the headers of a request to `url` with the key, and without one that stood there."""
        others = [(name, text) for name, text in headers.multi_items() if name.upper() != KEY_HEADER]
        key = self._key.reveal() if self.is_home(url) else ""
        return [*others, (KEY_HEADER, key)] if key else others

    def is_home(self, url: Any) -> bool:
        """Return whether an address, of httpx or httpx2, has the origin of the service."""
        return url is self._home or origin_of(url) == origin_of(self._home)


def origin_of(url: Any) -> tuple[str, bytes, int | None]:
    return url.scheme, url.raw_host, url.port or {"http": 80, "https": 443}.get(url.scheme)


_RESERVED: Final = frozenset(
    {"api_auth_key", "host", "accept", "accept-encoding", "content-type", "content-length", "content-encoding"}
    | {"transfer-encoding", "connection", "keep-alive", "te", "trailer", "upgrade", "expect", "if-none-match"}
    | {"proxy-authorization", "proxy-connection"}
)
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TEXT: Final = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")


def checked_headers(headers: Any, user_agent: Any) -> tuple[dict[str, Secret], str]:
    """Return more headers of each request, see `hidden_headers`, and the User-Agent."""
    more: dict[str, Secret] = headers or {}
    if not isinstance(more, dict):
        raise InvalidRequestError(f"headers must be a mapping of names to texts, not a {headers}")
    for name, secret in more.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequestError(f"headers has a name that HTTP does not allow: {shown(name)}")
        if name.lower() in _RESERVED:
            raise InvalidRequestError(
                f"headers cannot have {name}: the client sets it, or HTTP/1.1 itself does"
            )
        if name.lower() == "user-agent":
            raise InvalidRequestError("give user_agent= in place of a User-Agent in headers")
        if not secret.matches(_TEXT.pattern):
            raise InvalidRequestError(f"the value of {name} in headers must be a text of printable ASCII")
    agent = USER_AGENT if user_agent is None else text_of(user_agent)
    if not isinstance(agent, str) or not _TEXT.fullmatch(agent):
        raise InvalidRequestError(f"user_agent must be printable ASCII, not empty: {shown(user_agent)}")
    return more, agent
