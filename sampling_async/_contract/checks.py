"""Checks of numbers and times that users give, shared by all options of the package."""

from __future__ import annotations

import operator
import os
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard
from uuid import UUID

from sampling_async._contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import UnionType

    from attrs import Attribute


class HiddenText(Protocol):
    """A text that its repr hides, such as pydantic's SecretStr."""

    def get_secret_value(self) -> str:
        """Return the text."""
        ...


class TypedURL(Protocol):
    """An address, such as pydantic's HttpUrl and PostgresDsn."""

    def unicode_string(self) -> str:
        """Return the text."""
        ...


Text: TypeAlias = "str | UUID | os.PathLike[str] | HiddenText | TypedURL"
"""What is taken where a text is."""


def text_of(value: object) -> Any:
    """Return the text of what stands for one, see `Text`; anything else as it is, for a check."""
    if isinstance(value, str | type):
        return value
    for method in ("get_secret_value", "unicode_string", "__fspath__"):
        read: Callable[[], Any] | None = getattr(value, method, None)
        if read is not None:
            return text_of(read())
    return str(value) if isinstance(value, UUID) else value


def texts_of(values: Any) -> tuple[Any, ...]:
    """Return the texts of one that stands for a text, or of several."""
    one = text_of(values)
    return (one,) if isinstance(one, str) else tuple(text_of(each) for each in values)


def number_above_0(value: object, name: str, what: str = "a number") -> float:
    """Return a number above 0 as a float. `name` and `what`, its meaning, are for the error."""
    number = _number(value)
    # `not number > 0` also refuses NaN, which `number <= 0` would accept.
    if number is None or not number > 0:
        raise InvalidRequestError(f"{name} must be {what} above 0, not {shown(value)}")
    return number


def number_from_0(value: object, name: str, what: str = "a number") -> float:
    """Return a number of at least 0 as a float; otherwise as `number_above_0`."""
    number = _number(value)
    if number is None or not number >= 0:
        raise InvalidRequestError(f"{name} must be {what}, at least 0, not {shown(value)}")
    return number


def moment_of(value: object, name: str) -> float:
    """Return a time as seconds since 1970. Without a zone its meaning would depend on the machine."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidRequestError(f"{name} is a datetime with a time zone, such as datetime.now(UTC)")
    return value.timestamp()


def whole_number(value: object, name: str, *, least: int = 1, most: int | None = None) -> int:
    if not is_whole(value) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidRequestError(f"{name} must be a whole number {bounds}, not {shown(value)}")
    return value


def whole_id(value: object, name: str) -> int:
    """Return an ID as an int; whole numbers of NumPy and the like are taken too."""
    try:
        # `True` is an int in Python, but no ID.
        return operator.index(None if isinstance(value, bool) else value)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  __index__ of a foreign class may raise anything
        raise InvalidRequestError(f"{name} must be a whole number, not {shown(value)}") from None


def require_instance(value: object, kind: type | UnionType, name: str, what: str) -> None:
    """Check the class of an option; `what` says what to give: "a Timeouts, such as Timeouts(read=30)"."""
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{name} must be {what}, not {shown(value)}")


def require_functions(*, or_none: bool = False, **functions: object) -> None:
    """Check options that are called; with `or_none` they may be left out."""
    for name, function in functions.items():
        if not (callable(function) or (or_none and function is None)):
            raise InvalidRequestError(f"{name} must be a function, not {shown(function)}")


def require_flags(**flags: object) -> None:
    """Check options that are True or False. A text such as "false" would count as true."""
    for name, value in flags.items():
        require_instance(value, bool, name, "True or False")


def file_path(value: object, name: str) -> Path:
    """Return the path of a file: without NUL, and one that the system can encode."""
    if isinstance(value, str | os.PathLike):
        given = os.fspath(value)
        if isinstance(given, str) and Path(given).name and "\0" not in given and _can_be_encoded(given):
            return Path(given)
    given = "this text" if isinstance(value, str) else type(value).__name__
    raise InvalidRequestError(
        f"{name} must be a str or a path object that names a file, without NUL, not {given}"
    )


def _can_be_encoded(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: halves of surrogate pairs cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_utf8(path: Path) -> Path:
    """Return a path whose text is UTF-8: pyarrow opens no other."""
    if not is_utf8(str(path)):
        raise InvalidRequestError(f"{str(path)!r}: its name must be UTF-8; give it another one")
    return path


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number. `True` is an int in Python, but not a number that is meant."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole_from_1(_: object, attribute: Attribute[Any], value: object) -> None:
    whole_number(value, attribute.name)


def whole_of_31_bits(_: object, attribute: Attribute[Any], value: object) -> None:
    """Validate an attrs field: a number of things for each row, which must fit the numbers of NumPy."""
    whole_number(value, attribute.name, most=2**31 - 1)


def positive(owner: object, attribute: Attribute[Any], value: float | None) -> None:
    """Validate an attrs field: a number above 0. None is valid where it is the field's default."""
    if value is not None or attribute.default is not None:
        number_above_0(value, f"{type(owner).__name__}.{attribute.name}")


def positive_and_finite(owner: object, attribute: Attribute[Any], value: float) -> None:
    """Validate an attrs field: a number above 0 that is added to a time, and so has an end."""
    positive(owner, attribute, value)
    if not isfinite(value):
        raise InvalidRequestError(f"{type(owner).__name__}.{attribute.name} must be finite, not {value}")


def not_negative(owner: object, attribute: Attribute[Any], value: float) -> None:
    number_from_0(value, f"{type(owner).__name__}.{attribute.name}")


def is_id(_: object, attribute: Attribute[Any], value: object) -> None:
    """Validate an attrs field: an ID, see `whole_id`."""
    whole_id(value, attribute.name)


def is_flag(owner: object, attribute: Attribute[Any], value: object) -> None:
    """Validate an attrs field: True or False."""
    require_flags(**{f"{type(owner).__name__}.{attribute.name}": value})


def _number(value: object) -> float | None:
    try:
        return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # the whole number is beyond 10**308, the largest float
        return None


def count_of(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun: "1 request", "1,200 requests"; `nouns` is an irregular plural."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def shown(value: object) -> str:
    """Return a value as errors show it: not longer than 60 characters."""
    # A whole number that is no float may have thousands of digits: Python refuses to print more than 4,300.
    too_large = type(value) is int and _number(value) is None
    return "a number too large for a float" if too_large else repr(value)[:60]
