"""The rows of a journal: an SQLite table that only grows, with each row chained to the one before.

Each row holds a digest of its own content and of the digest before. So a row that was changed or removed is
noticed. An index finds the quotas of a member. It is made from the rows when a journal is opened, and thrown
away at the end: it cannot be damaged, and it contains no member codes.
"""

from __future__ import annotations

import json
import sqlite3
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sampling_async._contract.errors import JournalError
from sampling_async._journal.database import transaction
from sampling_async._journal.lock import FORM, Damage, Header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

APPLICATION: Final = 0x5A3971  # SQLite's mark for the application that a database belongs to
SENT: Final = b"sent"
ANSWERED: Final = b"answered"
DIGEST: Final = 16

_TABLES: Final = f"""
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {FORM};
CREATE TABLE owner (base_url TEXT NOT NULL, panel_guid TEXT NOT NULL, seed BLOB NOT NULL);
CREATE TABLE rows (
    row INTEGER PRIMARY KEY, kind TEXT NOT NULL, chunk INTEGER NOT NULL, member_code BLOB NOT NULL,
    content BLOB NOT NULL, digest BLOB NOT NULL
);
"""
_ROWS: Final = "SELECT row, kind, chunk, member_code, content, digest FROM rows WHERE row >= ? ORDER BY row"
_INSERT: Final = "INSERT INTO rows VALUES (?, CAST(? AS TEXT), ?, ?, ?, ?)"
_TYPES: Final = [int, bytes, int, bytes, bytes, bytes]
_INDEX: Final = """
PRAGMA journal_mode = MEMORY;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -16000;
CREATE TABLE member (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE);
CREATE TABLE pair (
    member INTEGER NOT NULL, quota_id INTEGER NOT NULL, chunk INTEGER NOT NULL, is_recalled INTEGER,
    PRIMARY KEY (member, quota_id)
) WITHOUT ROWID;
CREATE TABLE answer (chunk INTEGER PRIMARY KEY, row INTEGER NOT NULL);
"""
_FIND: Final = """
SELECT quota_id, chunk, row FROM pair LEFT JOIN answer USING (chunk)
WHERE member = (SELECT id FROM member WHERE digest = ?) AND quota_id IN (SELECT value FROM json_each(?))
"""
_SENT: Final = """
SELECT row, chunk, member_code, content FROM rows
WHERE row > ? AND kind = 'sent' AND (? IS NULL OR member_code = ?) AND (? IS NULL OR chunk <= ?) ORDER BY row
"""
_RECALLED: Final = """
UPDATE pair SET is_recalled = 1
WHERE member = (SELECT id FROM member WHERE digest = ?) AND quota_id IN (SELECT value FROM json_each(?))
"""
_STILL: Final = """
SELECT quota_id FROM pair
WHERE member = (SELECT id FROM member WHERE digest = ?) AND chunk = ?
AND quota_id IN (SELECT each.value FROM json_each(?) AS each) AND (? IS NULL OR is_recalled IS NULL)
"""
_ADD_PAIRS: Final = """
INSERT OR REPLACE INTO pair
SELECT member.id, each.value, ?, NULL FROM member CROSS JOIN json_each(?) AS each WHERE member.digest = ?
"""
_UNINDEXED: Final = 4096
"""The most rows that are not in the index yet."""

_TOGETHER: Final = 1000
"""With this many quotas, `requests` returns and leaves the next request to the next call."""

_FEW: Final = 5  # for fewer lines, a search for each is faster than splitting the whole row


class Note(NamedTuple):
    """The content of a row that is to be written.

    Attributes:
        kind: `SENT` or `ANSWERED`.
        chunk: The number of the chunk.
        member_code: The member, in UTF-8.
        content: For `SENT`, the quota IDs as a JSON list. For `ANSWERED`, a line for each outcome: a line feed
            and a JSON list that begins with the quota ID.
    """

    kind: bytes
    chunk: int
    member_code: bytes
    content: bytes


class Latest(NamedTuple):
    """The latest entry of a pair of member and quota.

    Attributes:
        chunk: The chunk in which the quota was sent last.
        line: The line with its outcome in that chunk; None if no outcome was recorded.
    """

    chunk: int
    line: bytes | None


class JournaledRequest(NamedTuple):
    """The outcomes of a chunk, for those quotas that were not sent again later.

    Attributes:
        row: The `SENT` row of the chunk.
        member_code: The member, in UTF-8.
        lines: The line of each of these quotas; None if no outcome was recorded.
    """

    row: int
    member_code: bytes
    lines: dict[int, bytes | None]


UNREADABLE: Final = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What is raised for damage: Python decodes the text of SQLite's error, which may quote the file."""


class JournalRows:
    """The rows in one file.

    Args:
        path: The file, which must exist.
        is_damaged: Whether to read what can be read. SQLite refuses a file that is shorter than its header
            says, or whose schema it cannot read.

    Attributes:
        header: The number of rows, and the last digest.
        chunks: The highest chunk number.
        members: The members with rows, and a few others.
    """

    def __init__(self, path: Path, *, is_damaged: bool = False) -> None:
        self.header = Header(0, b"")
        self.chunks = 0
        self.members = MemberFilter()
        self._unindexed: list[tuple[int, Note]] = []
        self._path = path
        self._database = _opened_database(str(path))
        # An empty name makes a temporary database: in memory, or in a nameless file if it grows too large.
        self._index = _opened_database("")
        self._index.executescript(_INDEX)
        if is_damaged:
            self._database.execute("PRAGMA writable_schema = ON")
        self._database.execute("PRAGMA locking_mode = EXCLUSIVE")

    def forget(self) -> None:
        """In the child of a fork: never close the databases: that would write to the parent's files."""
        import ctypes  # noqa: PLC0415

        # One reference too many, so that Python never frees the objects, which would close the databases.

        for database in (self._database, self._index):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))

    def close(self) -> None:
        """Close both databases."""
        self._index.close()
        self._database.close()

    # --- The owner

    def has_none(self) -> bool:
        """Return whether this is an empty database."""
        return not self._one("SELECT count(*) FROM sqlite_master")[0]

    def is_foreign(self) -> bool:
        """Return whether this database belongs to another application."""
        return bool(self._one("PRAGMA application_id")[0] != APPLICATION)

    def form(self) -> int:
        """Return the version of the format of the rows."""
        form: int = self._one("PRAGMA user_version")[0]
        return form

    def make(self, owner: tuple[str, str], seed: bytes) -> None:
        """Create the tables."""
        with transaction(self._database):
            for statement in filter(str.strip, _TABLES.split(";")):
                self._database.execute(statement)
            self._database.execute("INSERT INTO owner VALUES (?, ?, ?)", (*owner, seed))
        self.header = Header(0, seed)
        self._set_pragmas()

    def owner(self) -> tuple[str, str]:
        """Return the owner of the rows: the service's address and the panel."""
        base_url, panel_guid, _ = self._owner()
        return base_url.decode("utf-8", "replace"), panel_guid.decode("utf-8", "replace")

    def _owner(self) -> tuple[bytes, bytes, bytes]:
        found = self._database.execute("SELECT base_url, panel_guid, seed FROM owner").fetchone()
        if found is None or set(map(type, found)) != {bytes}:
            raise Damage("the service and panel it was written for cannot be read")
        owner: tuple[bytes, bytes, bytes] = found
        return owner

    def _one(self, statement: str) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._database.execute(statement).fetchone()
        return found

    def _set_pragmas(self) -> None:
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")

    # --- Reading

    def load(self, header: Header, is_wanted: Callable[[], bool]) -> None:
        """Check every row, and build the index.

        Args:
            header: The number of rows and the digest in the lock file. There may be more rows by now.
            is_wanted: Called for each row. If it returns False, this ends early.

        Raises:
            Damage: Rows were changed or are missing.
            JournalError: The rows are not wanted any more.
        """
        self._set_pragmas()
        if self._one("PRAGMA quick_check(1)")[0] != b"ok":
            raise Damage("SQLite finds damaged pages in the file")
        self.header = at_header = Header(0, self._owner()[2])
        for note in self._verified():
            self._add(self.header.rows, note)
            if note.kind == SENT:
                self.members.add(note.member_code)
            # The digest at the row that the lock file names must be the digest in the lock file.
            if self.header.rows == header.rows:
                at_header = self.header
            if not is_wanted():
                raise JournalError("is no longer needed: its user stopped waiting", path=self._path)
        if self.header.rows < header.rows:
            raise Damage(f"the last {header.rows - self.header.rows} of {header.rows} rows are missing")
        if at_header != header:
            raise Damage("the rows and the lock file do not belong together")

    def _verified(self) -> Iterator[Note]:
        """Yield the rows, check each of them, and advance `header`.

        Raises:
            Damage: A row was changed or is missing.
        """
        for found in self._found(1):
            row = self.header.rows + 1
            if found[0] != row:
                raise Damage(f"row {row} is missing")
            digest = _chained(self.header.digest, found)
            if not digest or digest != found[5]:
                raise Damage(f"row {row} was changed")
            self.header = Header(row, found[5])
            yield Note(*found[1:5])

    def _found(self, row: int) -> Iterator[tuple[Any, ...]]:
        """Yield the rows from number `row` on, unchecked.

        Raises:
            Damage: A row cannot be read.
        """
        rows = self._database.execute(_ROWS, (row,))
        while True:
            try:
                found = next(rows, None)
            except UNREADABLE:
                found = ()
            if found is None:
                return
            if not found:
                raise Damage(f"row {row} cannot be read")
            row = found[0] + 1
            yield found

    def salvaged(self, expected: int) -> Iterator[tuple[Note, bool]]:
        """Yield all rows that can be read, each with whether it was certainly not changed.

        Args:
            expected: The number of rows that there were. Behind it, the first unreadable row is the end.
        """
        # The digest before an unreadable row is lost. So the first row behind it is doubtful, and the second
        # one can be checked again.
        row, digest = 1, self._seed()
        while True:
            try:
                for found in self._found(row):
                    chained = digest and found[0] == row and _chained(digest, found)
                    sound = bool(chained) and chained == found[5]
                    row, digest = found[0] + 1, found[5] if type(found[5]) is bytes else None
                    if list(map(type, found)) == _TYPES:
                        yield Note(*found[1:5]), sound
            except (*UNREADABLE, Damage):
                row, digest = row + 1, None
                if row <= expected:
                    continue
            return

    def _seed(self) -> bytes | None:
        try:
            return self._owner()[2]
        except (*UNREADABLE, Damage):
            return None

    def recall(self, member_code: bytes, quota_ids: Iterable[int]) -> dict[int, Latest]:
        """Return the latest entry of each of these quotas of a member, if it was ever sent."""
        self._index_rows()
        key, asked = _key_of(member_code), json.dumps([*quota_ids])
        known: dict[int, Latest] = {}
        by_row: dict[tuple[int, int], list[int]] = {}
        for quota_id, chunk, row in self._index.execute(_FIND, (key, asked)):
            known[quota_id] = Latest(chunk, None)
            if row is not None:
                by_row.setdefault((chunk, row), []).append(quota_id)
        if known:
            self._index.execute(_RECALLED, (key, asked))
        for (chunk, row), ids in by_row.items():
            known.update((quota_id, Latest(chunk, line)) for quota_id, line in _lines(self._content(row), ids))
        return known

    def requests(
        self, after: int, member_code: bytes | None, *, rest_before: int | None = None
    ) -> list[JournaledRequest]:
        """Return the outcomes of the next chunks after a row, in their order; an empty list after the last.

        Args:
            after: The row of the last request that was returned, or 0.
            member_code: Return the chunks of this member only, if given.
            rest_before: Return the chunks up to this one only, and of them what was not recalled, if given.
        """
        self._index_rows()
        found: list[JournaledRequest] = []
        quotas = 0
        of_which = (after, member_code, member_code, rest_before, rest_before)
        for row, chunk, member, content in self._database.execute(_SENT, of_which):
            asked = (_key_of(member), chunk, content.decode("ascii"), rest_before)
            still = {each for (each,) in self._index.execute(_STILL, asked)}
            lines: dict[int, bytes | None] = {each: None for each in json.loads(content) if each in still}
            answer = self._index.execute("SELECT row FROM answer WHERE chunk = ?", (chunk,)).fetchone()
            if lines and answer is not None:
                lines.update(_lines(self._content(answer[0]), [*lines]))
            found.append(JournaledRequest(row, member, lines))
            quotas += len(lines)
            if quotas >= _TOGETHER:
                break
        return found

    def _content(self, row: int) -> bytes:
        found = self._database.execute("SELECT content FROM rows WHERE row = ?", (row,)).fetchone()
        if found is None or type(found[0]) is not bytes:
            raise JournalError(f"has been damaged since it was opened: row {row} is missing", path=self._path)
        content: bytes = found[0]
        return content

    # --- Writing

    def append(self, notes: Iterable[Note]) -> None:
        """Add rows. They are on disk when this returns."""
        header = self.header
        values: list[tuple[Any, ...]] = []
        for note in notes:
            row = header.rows + 1
            header = Header(row, _chained(header.digest, (row, *note)))
            values.append((row, *note, header.digest))
            # Before the rows are written: if that fails, the index has entries without rows. In the other order
            # it could miss entries, and their quotas would be sent again.
            self._add(row, note)
        with transaction(self._database):
            self._database.executemany(_INSERT, values)
        self.header = header

    def _add(self, row: int, note: Note) -> None:
        """Add a row to those that the index will have before it is next read: many at once cost a third."""
        self._unindexed.append((row, note))
        if note.kind == SENT:
            self.chunks = max(self.chunks, note.chunk)
        if len(self._unindexed) >= _UNINDEXED:
            self._index_rows()

    def _index_rows(self) -> None:
        if not self._unindexed:
            return
        sent = [note for _, note in self._unindexed if note.kind == SENT]
        keys = [_key_of(note.member_code) for note in sent]
        pairs = [(note.chunk, note.content.decode("ascii"), key) for note, key in zip(sent, keys, strict=True)]
        answered = [(note.chunk, row) for row, note in self._unindexed if note.kind == ANSWERED]
        with transaction(self._index):
            self._index.executemany(
                "INSERT OR IGNORE INTO member (digest) VALUES (?)", ((key,) for key in keys)
            )
            self._index.executemany(_ADD_PAIRS, pairs)
            self._index.executemany("INSERT OR REPLACE INTO answer VALUES (?, ?)", answered)
        self._unindexed.clear()

    def copy(self, path: Path) -> None:
        """Copy all rows into an existing, empty file."""
        target = sqlite3.connect(path, isolation_level=None)
        try:
            self._database.backup(target)
        finally:
            target.close()


def _key_of(member_code: bytes) -> bytes:
    return blake2b(member_code, digest_size=DIGEST).digest()


def _opened_database(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    # Damaged text may not be UTF-8. Decoding it would raise an error of SQLite that quotes it.
    database.text_factory = bytes
    return database


def _chained(digest: bytes, row: tuple[Any, ...]) -> bytes:
    """Return the digest of a row that follows a row with `digest`; empty if a value has the wrong type."""
    number, kind, chunk, member_code, content = row[:5]
    if list(map(type, row[:5])) != _TYPES[:5]:
        return b""
    head = b"%b %d %b %d %d " % (digest, number, kind, chunk, len(member_code))
    return blake2b(b"".join((head, member_code, content)), digest_size=DIGEST).digest()


def _lines(content: bytes, quota_ids: list[int]) -> Iterator[tuple[int, bytes | None]]:
    """Yield the line of each of these quotas; None if there is none."""
    if len(quota_ids) < _FEW:
        for quota_id in quota_ids:
            start = content.find(b"\n[%d," % quota_id)
            yield quota_id, content[start + 1 :].split(b"\n", 1)[0] if start >= 0 else None
        return
    by_id = {line[1 : line.find(b",")]: line for line in content.split(b"\n")}
    for quota_id in quota_ids:
        yield quota_id, by_id.get(b"%d" % quota_id)


_FIRST: Final = 2**20
"""The bits of the first field: 128 KiB, for 65,536 members."""

_BITS_EACH: Final = 16
_PROBES: Final = 4  # with 16 bits a member, one of 400 others is taken for a member


class MemberFilter:
    """A Bloom filter that grows: a full field of bits is followed by one that is four times as large.

    A set of a million codes would take 100 MB, and this takes 3.
    """

    __slots__ = ("_fields", "_room")

    def __init__(self) -> None:
        self._fields = [bytearray(_FIRST // 8)]
        self._room = _FIRST // _BITS_EACH

    def add(self, member_code: bytes) -> None:
        """Add a member."""
        bits = _bits(member_code)
        if self._has(bits):
            return
        if not self._room:
            self._fields.append(bytearray(4 * len(self._fields[-1])))
            self._room = 8 * len(self._fields[-1]) // _BITS_EACH
        self._room -= 1
        field = self._fields[-1]
        for bit in bits:
            at = bit % (8 * len(field))
            field[at >> 3] |= 1 << (at & 7)

    def __contains__(self, member_code: bytes) -> bool:
        return self._has(_bits(member_code))

    def _has(self, bits: list[int]) -> bool:
        return any(_are_set(field, bits) for field in self._fields)


def _bits(member_code: bytes) -> list[int]:
    # Two halves of one hash do as well as four hashes (Kirsch and Mitzenmacher).
    first, second = divmod(hash(member_code) & 2**64 - 1, 2**32)
    return [first + probe * (second | 1) for probe in range(_PROBES)]


def _are_set(field: bytearray, bits: list[int]) -> bool:
    size = 8 * len(field)
    return all(field[(bit % size) >> 3] >> (bit % size & 7) & 1 for bit in bits)
