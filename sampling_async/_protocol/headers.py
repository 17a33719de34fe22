"""Read the headers of a response that support cases need: bounded, printable, and without secrets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from attrs import field

from sampling_async._contract.headers import OF_INTEREST
from sampling_async._contract.structs import value
from sampling_async._protocol.refusals import decoded, without

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
