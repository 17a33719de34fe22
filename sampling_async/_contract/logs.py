"""What logs have in common: the name that a user gives a client, and failures that go on for long."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from sampling_async._contract.checks import shown, text_of
from sampling_async._contract.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from sampling_async._contract.checks import Text

_LONGEST: Final = 64


def panel_name_of(name: Text | None) -> str | None:
    if name is None:
        return None
    name = text_of(name)
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.strip()) <= _LONGEST:
        raise InvalidRequestError(
            f'name must be 1 to {_LONGEST} printable characters, such as "us", not {shown(name)}'
        )
    return name.strip()


class PanelLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages begin with the name of a client, and whose records have it as `panel`."""

    def __init__(self, logger: logging.Logger, name: str | None) -> None:
        super().__init__(logger)
        self._more: dict[str, Any] = {"panel": name} if name else {}
        self._prefix = f"{name}: ".replace("%", "%%") if name else ""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**self._more, **(kwargs.get("extra") or {})}
        return f"{self._prefix}{msg}", kwargs


class FailureLog:
    """Logs a failure once when it begins, however often it comes, and once when it is over.

    Attributes:
        reason: The latest failure, in words; empty if there is none.
    """

    def __init__(self, logger: logging.Logger, what: str, level: int = logging.WARNING) -> None:
        self.reason = ""
        self._logger = logger
        self._what = what
        self._level = level

    def failed(self, reason: object) -> None:
        """Record a failure."""
        if not self.reason:
            self._logger.log(self._level, "%s: %s", self._what, reason)
        self.reason = str(reason) or type(reason).__name__

    def over(self) -> None:
        """Record a success."""
        if self.reason:
            self._logger.log(self._level, "%s: this is over", self._what)
        self.reason = ""
