"""The handlers of an inbox: which function handles which record."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

from sampling_async import InvalidRequestError
from sampling_async.notifications._facts import Fact
from sampling_async.notifications._records import Notification, UnknownNotification

if TYPE_CHECKING:
    from sampling_async.notifications._records import Kind

_LOG: Final = logging.getLogger("sampling_async.notifications")
Handler: TypeAlias = Callable[[Fact[Any]], Awaitable[object] | object]

RECORDS: Final[dict[type[Any], Kind | None]] = {
    record: getattr(record, "kind", None) if record is not UnknownNotification else None
    for record in Notification.__args__
}
"""The records, with their kinds."""


class Handlers:
    def __init__(self) -> None:
        self._handlers: dict[type[Any], Handler] = {}
        self._is_closed = False
        self._warned: set[Kind] = set()

    def __bool__(self) -> bool:
        return bool(self._handlers)

    def add(self, records: tuple[type[Any], ...], handler: Handler) -> None:
        if self._is_closed:
            raise RuntimeError("register handlers before the inbox is opened: facts may wait in its store")
        annotated = _annotated(handler)
        for record in records:
            if record in self._handlers:
                raise InvalidRequestError(f"{record.__name__} has a handler already")
            if annotated and record not in annotated:
                names = ", ".join(sorted(each.__name__ for each in annotated))
                raise InvalidRequestError(
                    f"the handler {name_of(handler)} is registered for {record.__name__}, and annotated for"
                    f" {names}: annotate its argument with Fact[{record.__name__}], or register it for {names}"
                )
        self._handlers.update(dict.fromkeys(records, handler))

    def close(self) -> None:
        """Refuse further handlers; and all, if there is none for what is not understood."""
        if self._handlers and UnknownNotification not in self._handlers:
            raise InvalidRequestError(
                "register a handler for UnknownNotification too: money may be in what was not understood"
            )
        self._is_closed = True

    @property
    def kinds(self) -> list[Kind | None]:
        """The kinds that have a handler; None stands for what was not understood."""
        return [RECORDS[record] for record in self._handlers]

    def warn_without(self, kind: Kind) -> None:
        """Log once that facts of a kind wait and have no handler."""
        if kind not in self.kinds and kind not in self._warned:
            self._warned.add(kind)
            _LOG.warning("a %s came, and there is no handler for it: register one, its facts wait", kind)

    def of(self, fact: Fact[Any]) -> Handler:
        return self._handlers[type(fact.notification)]


def kind_of(record: Any) -> Kind | None:
    """Return the kind of a record; None for what was not understood."""
    if not isinstance(record, type) or record not in RECORDS:
        raise InvalidRequestError(
            f"{record!r} is no notification: Completion, Terminate and the others of"
            " sampling_async.notifications are"
        )
    return RECORDS[record]


def checked_records(records: tuple[Any, ...]) -> tuple[type[Any], ...]:
    if not records or any(inspect.isroutine(record) for record in records):
        raise InvalidRequestError("inbox.on takes the records of the handler: write @inbox.on(Completion)")
    for record in records:
        kind_of(record)
    return records


def name_of(handler: object) -> str:
    return getattr(handler, "__qualname__", None) or type(handler).__qualname__


def _annotated(handler: Handler) -> set[type[Any]]:
    try:
        first = next(iter(inspect.signature(handler, eval_str=True).parameters.values()))
    except Exception:  # noqa: BLE001  no signature, or names that are not there at run time: nothing is known
        return set()
    return _records_in(first.annotation)


def _records_in(hint: Any) -> set[type[Any]]:
    if isinstance(hint, type) and hint in RECORDS:
        return {hint}
    return {record for part in get_args(hint) for record in _records_in(part)}
