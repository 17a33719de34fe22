"""The last good inventory in a file, for the next start. It is read and written in a thread.

The first line says what the file is. Then come the inventory without its surveys, each survey in a line, and a
digest of all lines before. A file that was cut off, altered or made by something else is not used.
"""

from __future__ import annotations

import glob
import logging
import time
from contextlib import suppress
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Final

from attrs import evolve

from sampling_async._contract.checks import file_path
from sampling_async._contract.errors import DecodeError
from sampling_async._contract.records import Quotas, Survey
from sampling_async._json.converter import from_json, plain_json, to_json
from sampling_async._json.rules import parse
from sampling_async._pacing.gc_pauses import defer_full_gc
from sampling_async._private_files import UNFINISHED, require_private, target_of, written_whole

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

_FORM: Final = "sampling_async inventory 1"
_LOG: Final = logging.getLogger("sampling_async.watch")
_LATE_START: Final = 300.0  # seconds by which a file may be from the future: clocks are set back
_LEFTOVER: Final = 3600.0  # seconds after which nobody writes to a temporary file any longer


class CacheFile:
    """The file of one watch. An inventory older than `max_age` seconds, or of another `owner`, is not used."""

    def __init__(self, path: str | os.PathLike[str], owner: str, max_age: float) -> None:
        self._path = file_path(path, "cache")
        self._owner = blake2b(owner.encode(), digest_size=16).hexdigest()
        self._max_age = max_age

    def load(self, now: float) -> tuple[Quotas, float] | None:
        """Return the inventory and when it was read, in seconds since 1970; None if it is not to be used."""
        try:
            self._remove_leftovers()
            # A pipe, for one, would be read for ever.
            if self._path.exists() and not self._path.is_file():
                raise ValueError("it is no regular file")  # noqa: TRY301
            require_private(self._path)
            body = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            self._warn("read", exc)
            return None
        try:
            quotas, began = self._read(body)
        except (DecodeError, ValueError) as exc:
            _LOG.warning("the cache %s is not used: %s", self._path, exc)
            return None
        if not -_LATE_START <= now - began <= self._max_age:
            _LOG.info("the cache %s is not used: it is %.0f s old", self._path, now - began)
            return None
        return quotas, began

    def _read(self, body: bytes) -> tuple[Quotas, float]:
        lines = body.splitlines(keepends=True)
        head = parse(lines[0] if lines else b"")
        if not isinstance(head, dict) or head.get("form") != _FORM:
            raise ValueError("it has another form")
        if head.get("owner") != self._owner:
            raise ValueError("it belongs to another address, panel or option")
        if lines[-1] != _ended(blake2b(memoryview(body)[: -len(lines[-1])])):
            raise ValueError("it is damaged")
        surveys: list[Survey] = []
        for line in lines[2:-1]:
            defer_full_gc()
            surveys.append(from_json(Survey, line))
        return evolve(from_json(Quotas, lines[1]), surveys=tuple(surveys)), float(head["began"])

    def save(self, quotas: Quotas, began: float) -> None:
        """Replace the file. Nothing raises: a failure is logged."""
        try:
            require_private(self._path)
            with written_whole(self._path) as unfinished, unfinished.open("wb") as file:
                file.writelines(self._lines(quotas, began))
        except Exception as exc:  # noqa: BLE001  nobody waits for this thread
            self._warn("written", exc)

    def _warn(self, done: str, exc: Exception) -> None:
        reason = exc.strerror if isinstance(exc, OSError) else None
        _LOG.warning("the cache %s cannot be %s: %s", self._path, done, reason or exc)

    def _remove_leftovers(self) -> None:
        """Remove what processes that were killed while they wrote have left."""
        target = target_of(self._path)
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.*{UNFINISHED}"):
            with suppress(OSError):
                if time.time() - leftover.stat().st_mtime > _LEFTOVER:
                    leftover.unlink()

    def _lines(self, quotas: Quotas, began: float) -> Iterator[bytes]:
        head = {"form": _FORM, "owner": self._owner, "began": began}
        digest = blake2b()
        first = (plain_json(head), to_json(evolve(quotas, surveys=())))
        for text in chain(first, map(plain_json, quotas.surveys)):
            line = text + b"\n"
            digest.update(line)
            yield line
        yield _ended(digest)


def _ended(digest: blake2b) -> bytes:
    return b'{"digest":"%b"}\n' % digest.hexdigest().encode()
