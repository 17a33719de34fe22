"""Tracebacks of handlers as a log may show them: without member codes and secrets."""

from __future__ import annotations

import json
import re
import traceback
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from sampling_async.notifications._records import UnknownNotification

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sampling_async.notifications._store import Fact

_HIDDEN: Final = "<hidden>"
_MOST_FRAMES: Final = 30
_LONGEST: Final = 8_000
_PLACE: Final = 'File "'
_SECRET_FIELDS: Final = {"encryptedvalue", "additionaldata"}


def masked_traceback(exc: BaseException, fact: Fact[Any], secrets: Iterable[str]) -> str:
    """Return the traceback of an exception that a handler raised, without the values of local variables.

    The member code of the fact, its signature, the data of its link and secrets are replaced in all lines. Of a
    fact that was not understood, the texts of exceptions are left out: what they may hold is not known.

    Args:
        exc: The exception.
        fact: The fact.
        secrets: More texts that must not be shown.
    """
    if isinstance(fact.notification, UnknownNotification):
        frames = traceback.format_tb(exc.__traceback__, -_MOST_FRAMES)
        text = f"Traceback (most recent call last):\n{''.join(frames)}{type(exc).__name__}: {_HIDDEN}"
    else:
        text = "".join(traceback.format_exception(exc, limit=-_MOST_FRAMES)).rstrip()
    hidden = _pattern([*_texts_of(fact), *secrets])
    # A short member code must not garble the numbers of lines.
    lines = [
        line if line.lstrip(" |+-").startswith(_PLACE) else hidden.sub(_HIDDEN, line)
        for line in text.split("\n")
    ]
    return "\n".join(lines)[-_LONGEST:]


def _texts_of(fact: Fact[Any]) -> Iterator[str]:
    yield getattr(fact.notification, "member_code", "")
    for name, value in fact.fields.items():
        if re.sub(r"[\W_]", "", str(name).casefold()) in _SECRET_FIELDS:
            yield str(value)


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds texts as they are, in a repr, in JSON and in a URL."""
    forms = {
        form
        for text in texts
        if text
        for form in (text, repr(text)[1:-1], json.dumps(text)[1:-1], quote(text, safe=""))
    }
    each = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    return re.compile(rf"(?<!\w)(?:{each})(?!\w)" if each else r"(?!)")
