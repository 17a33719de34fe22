"""Erase a member: what must stay for the money stays, without the code."""

from __future__ import annotations

import json
import re
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from sampling_async.notifications._bodies import NotUnderstoodError, RefusedBodyError, read_fields
from sampling_async.notifications._entries import (
    is_code,
    member_key,
    member_text,
    moved_identity,
    stand_in,
    text_code,
    without_code,
)
from sampling_async.notifications._stores import AnyStore, run_once, store_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sampling_async._contract.checks import Text
    from sampling_async.notifications._sql import SqlStore

_PAGE: Final = 500


@frozen(kw_only=True)
class ErasedMember:
    """What `erase_member` has changed.

    Attributes:
        facts: Facts that no longer name the member. Their dates, IDs, revenue and `Fact.key` stay.
        unhandled: How many of them waited for a handler, and are skipped now.
        invites: Invites in the ledger of outcomes that no longer name the member.
        links: Links of the router that were deleted.
        receipts: Receipts that were deleted.
        unclear: The IDs of facts that were not understood, or are damaged, and may name the member. They are
            left as they were.
    """

    facts: int
    unhandled: int
    invites: int
    links: int
    receipts: int
    unclear: tuple[int, ...]


def erase_member(store: AnyStore, member_code: Text) -> ErasedMember:
    """Erase a member from the store of an inbox: facts, receipts, invites of the ledger of outcomes, and links.

    The member is replaced by one that nobody has, the same in facts and invites, so that the sums of the ledger
    of outcomes stay. It reads all receipts, and may run while an inbox is open. What comes later about a survey
    and wave of these facts is joined to them, without the code: a repetition is no new fact, and a correction
    has `Fact.corrects`. What comes about other surveys is stored as for any other member.

    Raises:
        InvalidRequestError: The store is neither SQLite nor PostgreSQL, or the member code is no text.
        StoreError: The store cannot be read or written.
    """
    opened, code = store_of(store).copy(), text_code(member_code)
    with opened.reading("cannot be read", is_long=True) as run:
        last: int = run("SELECT coalesce(max(id), 0) FROM receipts").fetchone()[0]
        receipts = list(_receipts_of(opened, run, code, 0))

    def erased(it: SqlStore) -> ErasedMember:
        it.lock("facts")
        with it.as_written():
            later = _receipts_of(it, it.run, code, last)  # what came meanwhile
            return _erased(it, code, [*dict.fromkeys((*receipts, *later))])

    return run_once(opened, erased)


def _erased(store: SqlStore, member_code: str, receipts: list[int]) -> ErasedMember:
    nobody = stand_in(member_code)
    facts, states, moved, damaged = 0, list[str](), dict[str, str](), list[int]()
    # The correction of a terminate has no member of its own, and stands after the terminate.
    query = (
        "SELECT id, kind, key, identity, survey, wave, fields, state FROM facts"
        " WHERE member = ? OR member IS NULL AND kind IN ('invite', 'terminate') ORDER BY id"
    )
    for number, kind, before, identity, survey, wave, text, state in store.execute(
        query, (member_text(member_code),)
    ):
        fields = _read(text)
        if kind == "invite":
            if fields is None:
                damaged.append(number)
            if not _names(fields, member_code):
                continue
            key = json.dumps(["invite", token_hex(8)])
        elif survey is None:
            if before not in moved:
                continue
            key = moved[before]
        else:
            key = moved[before] = member_key(survey, wave, nobody)
        store.execute(
            "UPDATE facts SET key = ?, identity = ?, member = CASE WHEN member IS NULL THEN NULL ELSE ? END,"
            " fields = ?, content = '', error = NULL, owner = NULL,"
            " state = CASE WHEN state IN ('pending', 'dead') THEN 'skipped' ELSE state END WHERE id = ?",
            (
                key,
                moved_identity(identity, key),
                member_text(nobody),
                "{}" if fields is None else without_code(text, member_code, nobody),
                number,
            ),
        )
        facts += 1
        states.append(state)
    if moved:
        values = (member_text(nobody),)
        store.run("INSERT INTO erased (member) VALUES (?) ON CONFLICT (member) DO NOTHING", values)
    invites = _erase_invites(store, member_code, nobody)
    links = store.run("DELETE FROM links WHERE member = ?", (member_text(member_code),)).rowcount
    for number in receipts:
        store.run("DELETE FROM receipts WHERE id = ?", (number,))
    return ErasedMember(
        facts=facts,
        unhandled=sum(state in ("pending", "dead") for state in states),
        invites=invites,
        links=links,
        receipts=len(receipts),
        unclear=tuple(sorted([*damaged, *_unclear(store, member_code)])),
    )


def _erase_invites(store: SqlStore, member_code: str, nobody: str) -> int:
    query = "SELECT key, survey, wave FROM invites WHERE member = ?"
    invites = store.execute(query, (member_text(member_code),))
    for before, survey, wave in invites:
        key = member_key(survey, wave, nobody)
        # Recorded again after an earlier erasing.
        if store.execute("SELECT 1 FROM invites WHERE key = ?", (key,)):
            store.run("DELETE FROM invites WHERE key = ?", (before,))
        else:
            change = "UPDATE invites SET key = ?, member = ? WHERE key = ?"
            store.run(change, (key, member_text(nobody), before))
    return len(invites)


def _unclear(store: SqlStore, member_code: str) -> Iterator[int]:
    named = re.compile(rf"(?<!\w){re.escape(member_code)}(?!\w)")
    query = (
        "SELECT f.id, f.fields, r.body, r.query FROM facts AS f LEFT JOIN receipts AS r ON r.id = f.receipt"
        " WHERE f.kind = '' ORDER BY f.id"
    )
    for number, text, body, sent in store.execute(query):
        whole, fields = bytes(body or b"").decode("utf-8", "replace"), _read(text)
        if fields is None or named.search(whole) or named.search(str(sent)) or _names(fields, member_code):
            yield number


def _read(fields: str) -> Any:
    """Return the fields of a fact; None if they are damaged, which must not keep others from being erased."""
    try:
        return json.loads(fields)
    except (ValueError, TypeError):
        return None


def _receipts_of(store: SqlStore, run: Callable[..., Any], member_code: str, last: int) -> Iterator[int]:
    """Yield the receipts after `last` that name a member, but those of facts that were not understood."""
    query = (
        "SELECT id, body, query, headers FROM receipts AS r WHERE id > ? AND NOT EXISTS"
        " (SELECT 1 FROM facts AS f WHERE f.kind = '' AND f.receipt = r.id) ORDER BY id LIMIT ?"
    )
    while rows := run(query, (last, _PAGE)).fetchall():
        for number, body, sent, headers in rows:
            last = number
            with store.as_written():
                try:
                    fields = read_fields(bytes(body), json.loads(sent), json.loads(headers))
                except (NotUnderstoodError, RefusedBodyError):
                    continue
            if any(_names(each, member_code) for each in fields):
                yield number


def _names(value: Any, member_code: str, name: str = "") -> bool:
    """Return whether a value of a field, or one in it, is a member code."""
    if isinstance(value, dict):
        return any(_names(each, member_code, of) for of, each in value.items())
    if isinstance(value, list):
        return any(_names(each, member_code, name) for each in value)
    return is_code(name, value, member_code)
