"""Who may post notifications: secret paths or Basic auth, networks, proxies, and signatures of bodies."""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import urlsplit

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import shown, text_of, texts_of
from sampling_async.notifications._records import Completion, Kind, Reconciliation, Terminate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sampling_async._contract.checks import Text
    from sampling_async.notifications._records import Notification

_Network: TypeAlias = "IPv4Network | IPv6Network"
_SHORTEST: Final = 16
_UNIX: Final = "unix"
_UNRESERVED: Final = re.compile(r"[\w.~-]+", re.ASCII)


class AccessControl:
    """Decides whether a hit is accepted, before its body is read or stored; see `Inbox` for the arguments."""

    def __init__(
        self,
        secrets: Mapping[Kind, Sequence[str]],
        *,
        basic: Iterable[tuple[Text, Text]] = (),
        networks: Iterable[str] = (),
        trusted_proxies: Iterable[str] = (),
    ) -> None:
        self._secrets = {
            kind: [_in_a_path(_checked(secret, "secret")).encode() for secret in each]
            for kind, each in secrets.items()
        }
        self._basic = [
            f"{text_of(name)}:{_checked(text_of(password), 'password')}".encode() for name, password in basic
        ]
        for name, given in (("networks", networks), ("trusted_proxies", trusted_proxies)):
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise InvalidRequestError(
                    f"{name} must be a list of networks, such as ['198.51.100.0/24'], not {shown(given)}"
                )
        self._networks = [_network(text) for text in networks]
        proxies = list(trusted_proxies)
        self._trusts_socket = _UNIX in proxies
        self._proxies = [_network(text) for text in proxies if text != _UNIX]

    def authenticates(self, kind: Kind, secret: str, headers: Iterable[tuple[str, str]]) -> bool:
        """Return whether the secret of a path is one of the kind's, or the headers have a valid password.

        It takes the same time for right and wrong secrets: all are compared, and each one whole.
        """
        given = secret.encode("utf-8", "surrogatepass")
        results = [hmac.compare_digest(given, each) for each in self._secrets.get(kind, ())]
        if self._basic:
            claimed = _credentials(headers)
            results += [hmac.compare_digest(claimed, each) for each in self._basic]
        return any(results)

    def source(self, peer: str, headers: Iterable[tuple[str, str]]) -> str:
        """Return the address that a hit came from.

        X-Forwarded-For is read from its end, and only as far as trusted proxies have written it. What stands
        before could be written by anybody, and is ignored.
        """
        if not self._proxies and not self._trusts_socket:
            return peer
        hops = [hop.strip() for name, value in headers if name == "x-forwarded-for" for hop in value.split(",")]
        while hops and self._is_proxy(peer):
            peer = _without_port(hops.pop())
        return peer

    def _is_proxy(self, peer: str) -> bool:
        # Servers give no address for a Unix socket, or its path.
        is_socket = not peer or peer.startswith(("unix:", "/"))
        return self._trusts_socket if is_socket else _is_in(peer, self._proxies)

    def allows(self, source: str) -> bool:
        return not self._networks or _is_in(source, self._networks)


def _checked(secret: str, what: str) -> str:
    if not isinstance(secret, str) or len(secret) < _SHORTEST:
        raise InvalidRequestError(
            f"a {what} of notifications has at least {_SHORTEST} characters; secrets.token_urlsafe() makes one"
        )
    return secret


def _in_a_path(secret: str) -> str:
    if not _UNRESERVED.fullmatch(secret):
        raise InvalidRequestError(
            "a secret stands in a URL: it has letters, digits and -._~ only; secrets.token_urlsafe() makes one"
        )
    return secret


def _credentials(headers: Iterable[tuple[str, str]]) -> bytes:
    for name, value in headers:
        scheme, _, text = value.partition(" ")
        if name == "authorization" and scheme.casefold() == "basic":
            try:
                return base64.b64decode(text.strip(), validate=True)
            except ValueError:
                return b""
    return b""


def _network(text: Any) -> _Network:
    try:
        if isinstance(text, bytes | int):  # Python takes four bytes, and any number, for an address
            raise ValueError("it must be a text")  # noqa: TRY004, TRY301
        return ip_network(text)
    except ValueError as exc:
        raise InvalidRequestError(f"{text!r} is no network such as 198.51.100.0/24: {exc}") from None


def _is_in(address: str, networks: Sequence[_Network]) -> bool:
    try:
        parsed: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped:  # how a socket for both families shows IPv4
        parsed = parsed.ipv4_mapped
    return any(parsed in network for network in networks)


def _without_port(hop: str) -> str:
    """Return the address of `198.51.100.7`, `198.51.100.7:1234`, `2001:db8::7` or `[2001:db8::7]:1234`."""
    hop = hop.strip('"')
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop


# The number of digits identifies the hash.
_HASHES: Final = {64: "sha256", 40: "sha1", 32: "md5"}
_PORTS: Final = {"http": 80, "https": 443}
_SLASHES: Final = 3  # of https://partner.example/
_HEX: Final = re.compile("[0-9a-fA-F]+", re.ASCII)


def shared_secrets(secrets: Text | Iterable[Text], name: str = "secrets") -> tuple[bytes, ...]:
    """Return secrets as bytes; refuse none, and empty ones."""
    given = texts_of(secrets)
    if not given or not all(isinstance(secret, str) and secret.strip() for secret in given):
        raise InvalidRequestError(f"{name} are texts that are not empty, and at least one")
    return tuple(secret.encode("utf-8", "surrogatepass") for secret in given)


def _or_problem(secrets: Text | Iterable[Text]) -> tuple[bytes, ...] | str:
    """Return secrets as bytes, or the text of an error."""
    try:
        return shared_secrets(secrets)
    except InvalidRequestError as exc:
        return str(exc)


def is_signed(message: str, signature: str, secrets: Sequence[bytes]) -> bool:
    """Return whether a signature is the HMAC of a message under one of the secrets.

    The time this takes does not depend on how many digits agree, nor on which secret it is.
    """
    algorithm = _HASHES.get(len(signature))
    if algorithm is None or not _HEX.fullmatch(signature):
        return False
    claimed = signature.lower()
    text = message.encode("utf-8", "surrogatepass")
    results = [
        hmac.compare_digest(hmac.new(secret, text, algorithm).hexdigest(), claimed) for secret in secrets
    ]
    return any(results)


class Signatures:
    """Checks EncryptedValue: an HMAC over survey, wave and member, written one after the other."""

    def __init__(self, secrets: Text | Iterable[Text], *, is_required: bool) -> None:
        given = texts_of(secrets)
        if is_required and not given:
            raise InvalidRequestError("require_signature needs shared_secrets to check signatures with")
        self._secrets = shared_secrets(given, "shared_secrets") if given else ()
        self._is_required = is_required

    def verified(self, notification: Notification, signature: str | None, *, has_wave: bool = True) -> bool:
        """Return whether a signature proves survey, wave and member; False if it is not there, or not checked.

        Without a wave in the notification, it may be over survey and member alone. If it is wrong, or required
        and not there, a ForgedError is raised.
        """
        if not self._secrets or not isinstance(notification, Completion | Terminate | Reconciliation):
            return False
        if signature is None:
            if self._is_required:
                raise ForgedError("no signature")
            return False
        survey, member = notification.survey_id, notification.member_code
        messages = [f"{survey}{notification.wave_id}{member}", *([] if has_wave else [f"{survey}{member}"])]
        if not any(is_signed(message, signature, self._secrets) for message in messages):
            raise ForgedError("wrong signature")
        return True


class ForgedError(ValueError):
    """The sender of a notification does not know the secrets. The text is the verdict of its receipt."""


def verify_redirect(
    url: Text,
    secrets: Text | Iterable[Text],
    *,
    parameter: str | None = None,
    end_page: Text | Iterable[Text] | None = None,
) -> bool:
    """Return whether a redirect to an end page was signed with one of the secrets.

    The signature is the last parameter of the URL: an HMAC (SHA-256, SHA-1 or MD5, hexadecimal) over all that
    stands before it, the `&` included. So pass the URL as it came, with scheme and host, and not as a framework
    has parsed and joined it: another order of the parameters, or another escape, is another text.

    The signature was made over the end page as it is configured. A browser lowers the case of its host, and
    adds `/` if it has no path. So pass the configured end page too: without it, an added `/` is overlooked, but
    not another case of the host.

        verify_redirect("https://partner.example?status=qualified&mc=m1&hash=9f0c...", ["shared secret"])

    Args:
        url: The whole URL as the member's browser requested it.
        secrets: The secrets shared with the operator; several, while they are rotated.
        parameter: The name that the last parameter must have, see the setting "Standard EncryptionResult
            Parameter Name". By default it may have any name: the signature itself is what counts.
        end_page: The end page as it is configured at the operator, or several, such as
            `settings.qualified_url`; its query does not matter. Scheme, host and path of the signed text are
            taken from it, and the URL must be of the same host and path. The scheme may differ: behind a proxy
            with TLS, a service sees http.

    Returns:
        False also if the URL has no signature in that place.

    Raises:
        InvalidRequestError: There is no secret, or an empty one.
    """
    known = _or_problem(secrets)
    # Deleted before an error is raised: error reports may show the local variables of this frame.
    del secrets
    if isinstance(known, str):
        raise InvalidRequestError(known)
    start, ampersand, last = text_of(url).partition("#")[0].rpartition("&")
    name, equals, signature = last.partition("=")
    if not ampersand or not equals or (parameter is not None and name.casefold() != parameter.casefold()):
        return False
    page, _, query = (start + ampersand).partition("?")
    pages = _signed_pages(page, end_page)
    return any(is_signed(f"{each}?{query}", signature, known) for each in pages)


def _signed_pages(page: str, configured: Text | Iterable[Text] | None) -> list[str]:
    """Return the texts that may have been signed: the parts of a URL before its query."""
    if configured is None:
        return [page, *([page[:-1]] if page.endswith("/") and page.count("/") == _SLASHES else [])]
    bases = [each.partition("#")[0].partition("?")[0] for each in texts_of(configured)]
    return [base for base in bases if _place(base) == _place(page) is not None]


def _place(page: str) -> tuple[str, str] | None:
    """Return host and path of a URL as a browser writes them; None if it is not an http or https URL."""
    try:
        parts = urlsplit(page)
        if parts.scheme.lower() not in _PORTS:
            return None
        host = f"{parts.hostname}:{parts.port or ''}".removesuffix(f":{_PORTS[parts.scheme.lower()]}")
    except ValueError:
        return None
    return host.rstrip(":"), parts.path or "/"
