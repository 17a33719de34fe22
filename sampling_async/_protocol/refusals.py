"""Refusals: turn a response into an error that says whether the request was processed.

The headers that support cases need are read with it: bounded, printable, and without secrets.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, quote_plus, unquote

from attrs import field

from sampling_async._contract.errors import (
    BadRequestError,
    DecodeError,
    Delivery,
    ForbiddenError,
    ServerError,
    ServiceError,
    UnexpectedStatusError,
)
from sampling_async._contract.exchange import (
    ANSWERS,
    BAD_REQUEST,
    FORBIDDEN,
    INTERNAL_ERROR,
    NOT_FOUND,
    OK,
    UNAVAILABLE,
    Meaning,
    statuses,
)
from sampling_async._contract.headers import OF_INTEREST
from sampling_async._contract.result_codes import ResultCode
from sampling_async._contract.structs import value
from sampling_async._json.rules import parse, whole_number_or_none

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from sampling_async._contract.exchange import Reply


_NAMES: Final = {name.encode(): name for name in OF_INTEREST}
_ESCAPING: Final = frozenset("%\\&+")  # without one of these, a text has no encoded form of another
_HIDDEN: Final = "<hidden>"
_LONGEST: Final = 200


@value
class ReceivedHeaders:
    """The headers of one response. Calling this cleans them, so that it costs nothing if nobody reads them."""

    raw: Any = field(repr=False)  # pairs of bytes, or httpx's object
    private: tuple[str, ...] = field(repr=False)
    # A function, because results keep this object, and must not keep the key.
    secrets: Callable[[], tuple[str, ...]] = field(repr=False)

    def __call__(self) -> Mapping[str, str]:
        """Return the headers that are kept, by their names in lower case. Values of one name are joined."""
        pairs: Iterable[tuple[bytes, bytes]] = getattr(self.raw, "raw", self.raw) or ()
        found: dict[str, bytes] = {}
        for name, content in pairs:
            known = _NAMES.get(name.lower())
            if known is not None:
                found[known] = content if known not in found else b"%b, %b" % (found[known], content)
        private = tuple(filter(None, (*self.private, *self.secrets())))
        # In the order of importance, whatever the order on the wire.
        return {name: _cleaned(private, found[name]) for name in OF_INTEREST if name in found}


def _cleaned(private: tuple[str, ...], content: bytes) -> str:
    """Return a value as printable ASCII, without the private texts and without URLs, which may hold more."""
    text = decoded(content)
    lowered = text.lower()
    is_plain = text.isascii() and len(text) <= _LONGEST and text.isprintable() and _ESCAPING.isdisjoint(text)
    if not is_plain or any(secret.lower() in lowered for secret in private):
        text = without(private, unquote(text))
    if "://" in text:
        return _HIDDEN
    return text.encode("ascii", "replace").decode()


_UNPROCESSED: Final = statuses(Meaning.UNPROCESSED)
_PROVING_NOTHING: Final = frozenset({None, ResultCode.SUCCESS, ResultCode.TECHNICAL_ERROR})
"""Result codes of a refusal that do not say whether the request was processed.

These are no code, the code of success (which contradicts the status), and the code of a fault.
"""

_EXCERPT: Final = 200  # characters of the body in an error
_EXCERPTED: Final = 2**16  # bytes of the body that are cleaned for it
_JUDGED: Final = 2**20  # bytes of a body that may be a refusal: parsing many more would stall the event loop
_ESCAPED: Final = re.compile(
    r"(?:\\{1,4}|%)u(?P<hex>[0-9a-fA-F]{4})|&#(?:[xX](?P<entity>[0-9a-fA-F]{1,6})|(?P<decimal>[0-9]{1,7}));"
)
_NAMED: Final = re.compile(r"&[A-Za-z][A-Za-z0-9]{1,31};")
_LONGEST_ESCAPE: Final = 10
_UNMISTAKABLE: Final = 5  # characters of a private text that is replaced inside words too


def refusal(
    reply: Reply, *, private: tuple[str, ...] = (), unprocessed: AbstractSet[int] = _UNPROCESSED
) -> ServiceError | None:
    """Return the error of a response, or None for a 200 and its like (whose body may still be an error).

    It does not repeat the texts in `private`. The statuses in `unprocessed` prove that a request was not
    processed.
    """
    if reply.status in ANSWERS:
        return None
    return _service_error(reply, private, unprocessed, *_error_body(reply.body))


def disguised_refusal(reply: Reply, *, private: tuple[str, ...] = ()) -> ServiceError | None:
    """Return the error in the body of a 200, or None. For a body that does not hold the requested record."""
    result, code = _error_body(reply.body)
    return None if code is None else _service_error(reply, private, frozenset(), result, code)


def _service_error(
    reply: Reply, private: tuple[str, ...], unprocessed: AbstractSet[int], result: str | None, code: int | None
) -> ServiceError:
    error_class, says = _STATUS_ERRORS.get(reply.status, (None, ""))
    if error_class is None:
        error_class = ServerError if reply.status >= INTERNAL_ERROR else UnexpectedStatusError
    result = None if result is None else without(private, result)
    # The error's text gets the result only if it looks like a name: a sentence may mention the member.
    name = result if result and re.fullmatch(r"\w{1,64}", result) else ResultCode.name_of(code or 0)
    known = "" if code is None else f" {code} {name or ''}".rstrip()
    error = error_class(
        f"the service answered {reply.status}{known}{says}",
        delivery=_delivery(reply, result, code, unprocessed),
        status=reply.status,
        result=result,
        result_code=code,
        body_excerpt=without(private, decoded(reply.body[: _EXCERPTED + 1])),
    )
    error.retry_after = retry_after(reply)
    return error


_FORBIDDEN_HINT: Final = (
    ": the service refused the key, or a proxy dropped the header API_AUTH_KEY (nginx drops names with "
    "underscores unless underscores_in_headers is on, gunicorn unless header_map is dangerous)"
)


_STATUS_ERRORS: Final[Mapping[int, tuple[type[ServiceError], str]]] = {
    OK: (UnexpectedStatusError, " in the body of a 200"),
    BAD_REQUEST: (BadRequestError, ""),
    FORBIDDEN: (ForbiddenError, _FORBIDDEN_HINT),
    NOT_FOUND: (UnexpectedStatusError, ": nothing is there; see that base_url is the address of the service"),
}


def _delivery(reply: Reply, result: str | None, code: int | None, unprocessed: AbstractSet[int]) -> Delivery:
    """Return `answered` if a refusal proves that the request was not processed, else `unknown`.

    A proxy sends 503 for a backend that processed the request and then failed, and it may pass on a body that
    was cut as if it were whole. So a refusal is proof if its status has no other meaning, or if its body is the
    service's own and reports no fault.
    """
    if reply.is_followed:  # which of the two is the response to this request?
        return "unknown"
    if reply.status in unprocessed or reply.status == FORBIDDEN:
        return "answered"
    if not reply.is_whole or code in _PROVING_NOTHING:
        return "unknown"
    if reply.status == BAD_REQUEST:  # the status that the service itself uses for refusals
        return "answered"
    # For the other statuses, a name beside the code shows that the body is the service's own.
    refuses = BAD_REQUEST <= reply.status < INTERNAL_ERROR or reply.status == UNAVAILABLE
    return "answered" if refuses and result is not None else "unknown"


def _error_body(body: bytes) -> tuple[str | None, int | None]:
    """Return Result and ResultCode of an error body, whatever its type; (None, None) for another body."""
    try:
        document = parse(body) if len(body) <= _JUDGED else None
    except DecodeError:
        return None, None
    if type(document) is not dict:
        return None, None
    return text_of(document.get("Result")), whole_number_or_none(document.get("ResultCode"))


def text_of(value: Any) -> str | None:
    """Return a text, as long as it is: it may be cut only after `without`, which finds no half of a secret."""
    return value if type(value) is str else None


def without(private: tuple[str, ...], text: str) -> str:
    """Return the printable beginning of a text, without the private texts, also in their encoded forms."""
    import html  # noqa: PLC0415  for errors only, with a table of all entities

    if len(text) > _EXCERPTED:
        # The beginning of a private text may stand at the cut, and each of its characters may be escaped.
        text = text[: _EXCERPTED - _LONGEST_ESCAPE * max(map(len, private), default=0)]
    # Writers of JSON, HTML and URLs such as .NET's escape characters that need no escape. This is undone.
    text = _ESCAPED.sub(_unescaped, text).replace("\\/", "/")
    text = _NAMED.sub(lambda entity: html.unescape(entity[0]), text)
    for secret in private:
        # As in JSON, in a URL's path, in a query and in HTML. The longest form comes first in the pattern,
        # because a regular expression takes the first alternative that fits.
        old = quote(secret, safe="", encoding="latin-1", errors="replace")
        quoted = json.dumps(secret)[1:-1], quote(secret, safe=""), quote_plus(secret), html.escape(secret), old
        forms = "|".join(re.escape(form) for form in sorted({secret, *quoted}, key=len, reverse=True))
        # A short code may be part of an ordinary word, so it counts only as a whole word. A long one is not
        # part of a word by chance.
        whole = f"(?<!\\w)(?:{forms})(?!\\w)" if len(secret) < _UNMISTAKABLE else forms
        text = re.sub(whole, "<hidden>", text, flags=re.IGNORECASE)
    return _printable(text)[:_EXCERPT]


def decoded(body: bytes) -> str:
    """Return a body as text. A page that is not UTF-8 mostly is of an old server, and in Latin-1."""
    if body[:2] in {b"\xff\xfe", b"\xfe\xff"} or 4 * body.count(0) > len(body):
        return body.decode(json.detect_encoding(body), "replace")
    try:
        return body.decode()
    except UnicodeDecodeError as exc:
        is_cut = exc.start > len(body) - _LONGEST_ESCAPE
        return body.decode("utf-8", "replace") if is_cut else body.decode("latin-1")


def _unescaped(match: re.Match[str]) -> str:
    digits, decimal = match["hex"] or match["entity"], match["decimal"]
    number = int(digits, 16) if digits else int(decimal)
    return chr(number) if number <= sys.maxunicode else match[0]


def _printable(text: str) -> str:
    if text.isascii() and text.isidentifier():
        return text
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


_SECONDS: Final = r"[0-9]{1,9}(\.[0-9]{0,9})?"


def retry_after(reply: Reply, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> float | None:
    """Return the seconds that a response asks to wait (Retry-After), or None if there is no valid value.

    A date is compared with the response's own Date header, else with `now`: the local clock may be wrong.
    """
    asked = (reply.retry_after or "").strip()
    # Proxies join repeated headers. The longest of several numbers satisfies all of them.
    parts = [part.strip() for part in asked.split(",")]
    if all(re.fullmatch(_SECONDS, part) for part in parts):
        return max(map(float, parts))
    until = _http_date(asked)
    return None if until is None else max(0.0, (until - (_http_date(reply.date) or now())).total_seconds())


def _http_date(text: str | None) -> datetime | None:
    try:
        date = parsedate_to_datetime(text or "")
    except (ValueError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
