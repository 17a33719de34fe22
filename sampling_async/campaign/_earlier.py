"""What members hold, took, or were refused for good in earlier nights: those surveys are not planned again."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sampling_async._contract.checks import text_of
from sampling_async._contract.errors import InvalidRequestError
from sampling_async._contract.result_codes import ResultCode
from sampling_async._protocol.lessons import Lesson, rule_for
from sampling_async.campaign._ledger import CampaignLedger
from sampling_async.campaign._ledger_file import LEDGER_NAME, is_ledger
from sampling_async.notifications import SqlStore
from sampling_async.notifications._entries import code_of, member_text
from sampling_async.notifications._postgres import is_dsn
from sampling_async.notifications._stores import store_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sampling_async._protocol.lessons import Rule
    from sampling_async.notifications._stores import AnyStore

_LONG: Final = 90  # characters: those beyond ASCII take up to twelve as JSON, and 1,100 are stored as they are
_PASSING: Final = frozenset({Lesson.QUOTA, Lesson.SURVEY, Lesson.LATER, Lesson.MEMBER, Lesson.STOP})

# Whoever was routed has taken two surveys. Wave 0 means that the service named none. A link that was not
# refused is an invite, or may be one. PostgreSQL takes a NULL without a type for a text.
_IN_STORE: Final = """
SELECT member, survey, wave, '' AS state, CAST(NULL AS INTEGER) AS code FROM invites
UNION ALL SELECT member, survey, wave, '', NULL FROM facts
    WHERE kind IN ('completion', 'terminate') AND standing = 'stands' AND member IS NOT NULL
UNION ALL SELECT member, origin, 0, '', NULL FROM facts
    WHERE kind IN ('completion', 'terminate') AND standing = 'stands' AND origin != survey
UNION ALL SELECT member, survey, wave, CASE state WHEN 'refused' THEN 'rejected' ELSE '' END, code FROM links
"""


def held_in(
    store: AnyStore, rules: Mapping[int, Rule], *, own: Path, owner: tuple[str, str] | None
) -> Iterator[tuple[str, int, int]]:
    """Yield members with a survey and wave that they got, or were refused for good. Wave 0 stands for any.

    Args:
        store: The folder of a campaign or of several, a ledger, or a store of notifications and links.
        rules: What is done about result codes.
        own: The ledger that is planned; it is left out.
        owner: The service and panel that a ledger must be of; None for any.

    Raises:
        InvalidRequestError: It is none of these, cannot be read, or is a ledger of another service or panel.
        LedgerError: A ledger cannot be read.
        StoreError: A store cannot be read.
    """
    text = text_of(store) if not isinstance(store, SqlStore) else store
    if not isinstance(text, str) or is_dsn(text):
        yield from _in_store(store_of(store), rules)
        return
    try:
        ledgers = _ledgers_in(Path(text))
    except OSError as exc:
        raise InvalidRequestError(f"leave_out: {exc.filename or text} cannot be read: {exc.strerror}") from None
    if ledgers is None:
        yield from _in_store(store_of(text), rules)
    for each in ledgers or ():
        if not each.samefile(own):
            yield from _in_ledger(each, rules, owner)


def _ledgers_in(path: Path) -> list[Path] | None:
    """Return the ledgers that a path names; None if it is a store."""
    if not stat.S_ISDIR(path.stat().st_mode):
        return [path] if is_ledger(path) else None
    names = [LEDGER_NAME, *(f"{each.name}/{LEDGER_NAME}" for each in sorted(path.iterdir()))]
    found = [path / name for name in names if _is_there(path / name)]
    if not found:
        raise InvalidRequestError(f"leave_out: {path} holds no campaign: neither it nor a folder in it has one")
    return found


def _is_there(path: Path) -> bool:
    """Return whether a file is there. A folder that must not be looked into, or is away, is an error."""
    try:
        path.stat()
    except NotADirectoryError:
        return False
    except FileNotFoundError:
        path.parent.stat()  # a link to what is not there, such as a disk that is not mounted
        return False
    return True


def _in_ledger(
    path: Path, rules: Mapping[int, Rule], owner: tuple[str, str] | None
) -> Iterator[tuple[str, int, int]]:
    ledger = CampaignLedger(path)
    try:
        ledger.open(reads=True)
        if not ledger.plan:  # making it was cut off
            return
        found = json.loads(ledger.fact("owner") or "null")
        if None not in (found, owner) and tuple(found) != owner:
            raise InvalidRequestError(
                f"leave_out: {path} was written for another service or panel, whose members are others"
            )
        for code, survey, wave, state, result_code in ledger.delivered():
            if is_final(rules, state, result_code):
                yield code, survey, wave
    finally:
        ledger.close()


def _in_store(store: SqlStore, rules: Mapping[int, Rule]) -> Iterator[tuple[str, int, int]]:
    with store.failing("cannot be read"), store.as_written():
        for rows in store.copy().in_parts(_IN_STORE):
            for member, survey, wave, state, result_code in rows:
                if is_final(rules, state, result_code):
                    yield code_of(member), survey, wave


def stored_code(code: str) -> str:
    """Return a member code as a store has it: of a very long one, a hash."""
    return code_of(member_text(code)) if len(code) > _LONG else code


def is_final(rules: Mapping[int, Rule], state: str, code: int | None) -> bool:
    """Return whether a pair that was requested says that its survey is not for its member, today or later.

    A refusal whose reason may be over does not, such as a full quota or a cap of the day.
    """
    if state not in {"rejected", "not_sent"}:
        return True
    # Many of these in a row say something about a quota, but the member's profile stays what it is.
    return code is not None and (
        code == ResultCode.MEMBER_DOES_NOT_MATCH_QUOTA or rule_for(rules, code).lesson not in _PASSING
    )
