"""Repair of a damaged journal: the rows that can be read, and what follows from those that cannot."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from sampling_async._contract.records import INT64_MAX
from sampling_async._journal.database import beside, remove
from sampling_async._journal.lock import Damage
from sampling_async._journal.rows import ANSWERED, SENT, UNREADABLE, JournalRows, Note
from sampling_async._private_files import make_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_OF_LINES: Final = re.compile(rb"\n\[(\d{1,19}),")
_OF_LIST: Final = re.compile(rb"\d{1,19}")
_AT_ONCE: Final = 1_000
_SMALLEST_ROW: Final = 64
"""Bytes. The size of a damaged file divided by this is an upper estimate of the number of its rows."""


def salvage(
    path: Path, mended: JournalRows, expected: int, refuse_others: Callable[[JournalRows], None]
) -> None:
    """Copy the readable rows of a damaged file into another one, which is empty.

    The damaged file stays as it is. `expected` rows were there, as far as that is known. `refuse_others` raises
    if the rows belong to somebody else.
    """
    expected = max(expected, path.stat().st_size // _SMALLEST_ROW)
    doubtful: list[Note] = []
    _copy_readable(path, mended, expected, refuse_others, doubtful)
    if not mended.header.rows and not doubtful:
        # The description of the tables, on the first page, is the same in each journal.
        again = beside(path, "-again")
        try:
            _with_first_page_of(mended, path, again)
            _copy_readable(again, mended, expected, refuse_others, doubtful)
        finally:
            remove(again)
    mended.append(_unknown(doubtful, mended))


def _copy_readable(
    path: Path,
    mended: JournalRows,
    expected: int,
    refuse_others: Callable[[JournalRows], None],
    doubtful: list[Note],
) -> None:
    with suppress(*UNREADABLE):
        damaged = JournalRows(path, is_damaged=True)
        try:
            with suppress(*UNREADABLE, Damage):
                refuse_others(damaged)
            notes = _sound(damaged.salvaged(expected), doubtful)
            while some := tuple(islice(notes, _AT_ONCE)):
                mended.append(some)
        finally:
            damaged.close()


def _with_first_page_of(rows: JournalRows, damaged: Path, path: Path) -> None:
    """Copy a damaged file, with the first page of a sound journal in the place of its own."""
    remove(path)
    make_private(path)
    rows.copy(path)
    sound = path.read_bytes()
    # In the header of a database: the size of a page (1 stands for 65,536), and the number of pages.
    size = {1: 2**16}.get(said := int.from_bytes(sound[16:18], "big"), said)
    pages = -(-damaged.stat().st_size // size)
    with damaged.open("rb") as source, path.open("wb") as target:
        target.write(sound[:28] + pages.to_bytes(4, "big") + sound[32:size])
        source.seek(size)
        shutil.copyfileobj(source, target)


def _sound(found: Iterable[tuple[Note, bool]], doubtful: list[Note]) -> Iterator[Note]:
    """Yield the rows that were certainly not changed, and add all others to `doubtful`."""
    chunks: set[int] = set()
    for note, is_sound in found:
        if not is_sound:
            doubtful.append(note)
            continue
        # The `SENT` row of this chunk is damaged. The outcomes name the same quota IDs, so it is made again.
        if note.kind == ANSWERED and note.chunk not in chunks:
            yield note._replace(kind=SENT, content=_listed(_ids_of(note)))
        yield note
        chunks.add(note.chunk)


def _unknown(doubtful: Iterable[Note], mended: JournalRows) -> Iterator[Note]:
    """Yield `SENT` rows for the quota IDs in doubtful rows, unless a sound row has their outcomes.

    Without outcomes, these quota IDs are then `unknown`.
    """
    chunk = mended.chunks
    for note in doubtful:
        quota_ids = _ids_of(note)
        known = mended.recall(note.member_code, quota_ids)
        left = {each for each in quota_ids if each not in known or not _is_answer(known[each].line)}
        if left:
            chunk += 1
            yield Note(SENT, chunk, note.member_code, _listed(left))


def _ids_of(note: Note) -> set[int]:
    """Return the quota IDs in a row, as far as they can be read."""
    numbers = (_OF_LINES if note.content[:1] == b"\n" else _OF_LIST).findall(note.content)
    return {number for number in map(int, numbers) if 0 < number <= INT64_MAX}


def _listed(quota_ids: Iterable[int]) -> bytes:
    return json.dumps(sorted(quota_ids)).encode("ascii")


def _is_answer(line: bytes | None) -> bool:
    """Return whether a line records an outcome from the service: `invited` or `rejected`."""
    return line is not None and json.loads(line)[1] in {"invited", "rejected"}
