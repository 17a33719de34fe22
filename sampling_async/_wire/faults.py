"""The failures of an exchange. Our engine raises its own; other transports raise those of httpx or httpx2.

Both are known by the names of their classes. So nothing imports a library that no transport uses.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

_MODULES: Final = frozenset({"httpx", "httpx2", "sampling_async"})


class ExchangeError(Exception):
    """An exchange of our engine failed. The classes below are called as those of httpx."""


class TimeoutException(ExchangeError):  # noqa: N818  as httpx calls it
    """A time limit passed."""


class ConnectError(ExchangeError):
    """There was no connection."""


class ConnectTimeout(TimeoutException):
    """There was no connection in time."""


class WriteError(ExchangeError):
    """The request could not be sent."""


class WriteTimeout(TimeoutException):
    """The request could not be sent in time."""


class ReadError(ExchangeError):
    """The response could not be read."""


class ReadTimeout(TimeoutException):
    """The response did not come in time."""


class RemoteProtocolError(ExchangeError):
    """The response breaks the protocol."""


def is_any(exc: BaseException, *names: str) -> bool:
    """Return whether an exception is of one of these classes, of our engine, httpx or httpx2."""
    cls: Any = type(exc)
    return not _names_of(cls).isdisjoint(names)


@lru_cache(maxsize=256)
def _names_of(cls: Any) -> frozenset[str]:
    classes: tuple[type, ...] = cls.__mro__
    return frozenset(each.__name__ for each in classes if each.__module__.split(".")[0] in _MODULES)
