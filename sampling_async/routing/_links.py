"""The links of members in the store: what was requested, given, refused and entered.

A pair of member and quota is written down before it is requested. Until the response is there, the member is
leased: other processes wait. What was never settled is unclear once its lease has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attrs import field, frozen

from sampling_async import Invite, to_json
from sampling_async._contract.records import hidden
from sampling_async._journal.database import UNUSABLE
from sampling_async.notifications._entries import member_key, member_text
from sampling_async.notifications._outcomes import note_entered
from sampling_async.notifications._tables import BELIEVED
from sampling_async.routing._history import CLOCK_STEP, Caps, Histories, Link, MemberHistory
from sampling_async.routing._route import Offer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sampling_async.notifications._sql import SqlStore

_LINK: Final = "quota, survey, wave, state, owner, asked, until, code, invite, entered"
_ENDS: Final = (
    f"SELECT {{columns}} kind, survey, wave, origin, coalesce({BELIEVED}, at) FROM facts"  # noqa: S608  a constant
    " WHERE kind IN ('completion', 'terminate') AND standing = 'stands' AND {condition}"
)
_ASK: Final = (
    "INSERT INTO links (member, quota, survey, wave, state, owner, asked, until, changed)"
    " VALUES (?, ?, ?, ?, 'asking', ?, ?, ?, ?) ON CONFLICT (member, quota) DO UPDATE SET"
    " state = 'asking', owner = excluded.owner, asked = excluded.asked, until = excluded.until,"
    " changed = excluded.changed, code = NULL, invite = NULL, entered = NULL"
)
_SETTLE: Final = (
    "UPDATE links SET state = ?, until = ?, changed = ?, code = ?, invite = ?, owner = NULL"
    " WHERE member = ? AND quota = ? AND owner = ?"
)
_ABANDON: Final = "DELETE FROM links WHERE member = ? AND owner = ?"
# The invite may be of another survey and quota than requested. It may have been entered already, if it could
# not be stored at once.
_INTO_LEDGER: Final = (
    "INSERT INTO invites (key, member, survey, wave, quota, invited, entered) VALUES (?, ?, ?, ?, ?, ?,"
    " (SELECT entered FROM links WHERE member = ? AND quota = ?)) ON CONFLICT (key) DO NOTHING"
)


_READINGS: Final = 60
"""Readings, one a second, after which no transaction can bring a fact with a lower number any more."""


@frozen(kw_only=True)
class Settlement:
    """What became of one pair that was requested; `state` is None if nothing was sent."""

    offer: Offer
    state: str | None
    until: float = 0.0
    code: int | None = None
    invite: Invite | None = field(default=None, repr=hidden)


@frozen(kw_only=True)
class Turn:
    """What a member gets next: links that wait, or quotas that were written down to be requested.

    Attributes:
        history: What is known of the member, before these quotas.
        is_busy: Whether another process is asking for the member now.
        links: The links that were given and not entered, the newest first.
        asked: The quotas to ask for now.
    """

    history: MemberHistory
    is_busy: bool = False
    links: Sequence[Link] = ()
    asked: Sequence[Offer] = ()


@frozen(kw_only=True)
class Wish:
    """What a click asks the store for: one of these offers, the best first, `most` at once."""

    owner: str  # this question, and no other one
    member_code: str = field(repr=hidden)
    offers: Sequence[Offer]
    most: int
    quota_ids: frozenset[int] | None  # those that the member has clicked on; None for any
    takes_links: bool  # whether a link that waits will do
    caps: Caps
    watches: bool  # whether to wait for what another host may be asking for, by another clock
    abandoned: Collection[str] = ()  # earlier questions whose requests were certainly not sent
    began: float  # when the member clicked
    seconds: float  # of the lease


def begin(store: SqlStore, wish: Wish, clock: Callable[[], float]) -> Turn:
    """Return the links of a member, or lease the member and write down what is requested now."""
    member = member_text(wish.member_code)
    store.lock(f"links {member}")
    for owner in wish.abandoned:
        store.execute(_ABANDON, (member, owner))
    now = clock()
    links, history = _read(store, member, now)
    if written := {link.quota_id for link in links if link.owner == wish.owner}:
        # A transaction whose end was lost, and which runs again: these were written down for this very click.
        return Turn(history=history, asked=[each for each in wish.offers if each.quota_id in written])
    # Also if it is this process: an earlier click of it has asked, and waits for the response.
    if any(link.is_leased(now) or (wish.watches and link.may_be_leased(now)) for link in links):
        return Turn(history=history, is_busy=True)
    with store.as_written():
        waiting = [link for link in links if wish.takes_links and _waits(link, history, wish, now)]
    if waiting:
        return Turn(history=history, links=sorted(waiting, key=lambda link: -link.asked))
    if history.gets_nothing(wish.caps, now):
        return Turn(history=history)
    # A member is invited to one quota of a survey, once: also if its link is too old to be given, or its quota
    # has closed, and even if that opens again.
    left_out = history.left_out(now, lambda _: False)
    choice: dict[int, Offer] = {}
    for offer in wish.offers:
        if not left_out.has(offer.quota_id, offer.survey_id, offer.wave_id):
            choice.setdefault(offer.survey_id, offer)  # a member gets one link of a survey
    asked = list(choice.values())[: wish.most]
    for offer in asked:
        pair = (member, offer.quota_id, offer.survey_id, offer.wave_id)
        store.execute(_ASK, (*pair, wish.owner, now, now + wish.seconds, now))
    return Turn(history=history, asked=asked)


def _waits(link: Link, history: MemberHistory, wish: Wish, now: float) -> bool:
    if link.state != "invited" or link.until <= now:
        return False
    entered = history.entered_at(link.quota_id)
    # A click that came before another one entered the link, in the same moment, gets the same link. What is
    # still to come was entered by a host whose clock is ahead.
    is_of_this_moment = entered is not None and wish.began < entered <= now
    is_unused = entered is None and not history.gets_nothing(wish.caps, now)  # to enter it is a start
    return (
        (is_unused or is_of_this_moment)
        and not history.has_ended(link.survey_id, link.wave_id)
        and not history.has_ended(link.invite.survey_id, link.invite.wave_id)
        and (
            wish.quota_ids is None
            or link.quota_id in wish.quota_ids
            or any((link.survey_id, link.wave_id) == (offer.survey_id, offer.wave_id) for offer in wish.offers)
        )
    )


def _read(store: SqlStore, member: str, now: float) -> tuple[list[Link], MemberHistory]:
    history = MemberHistory()
    with store.as_written():
        query = f"SELECT {_LINK} FROM links WHERE member = ?"  # noqa: S608  columns
        links = [Link(*row) for row in store.execute(query, (member,))]
        for link in links:
            history.add_link(link, now)
        for end in store.execute(_ENDS.format(columns="", condition="member = ?"), (member,)):
            history.add_end(*end)
        for _, what, values in _invites(store.execute, "member = ?", member):
            _add(history, what, values, now)
        history.packed()
    return links, history


def settle(
    store: SqlStore, owner: str, member_code: str, settled: Iterable[Settlement], now: float
) -> MemberHistory:
    """Store what became of the requests, enter invites into the ledger of outcomes, and end the lease."""
    member = member_text(member_code)
    store.lock(f"links {member}")
    for each in settled:
        offer = each.offer
        if each.state is None:
            store.execute(f"{_ABANDON} AND quota = ?", (member, owner, offer.quota_id))
            continue
        invite = None if each.invite is None else to_json(each.invite).decode()
        values = (each.state, each.until, now, each.code, invite, member, offer.quota_id, owner)
        store.execute(_SETTLE, values)
        if each.invite is not None:
            key = member_key(each.invite.survey_id, each.invite.wave_id, member_code)
            row = (key, member, each.invite.survey_id, each.invite.wave_id, offer.quota_id, now)
            store.execute(_INTO_LEDGER, (*row, member, offer.quota_id))
    return _read(store, member, now)[1]


def abandon(store: SqlStore, member_code: str, owners: Collection[str], now: float) -> MemberHistory:
    """Delete what was written down by questions whose requests were certainly not sent."""
    member = member_text(member_code)
    store.lock(f"links {member}")
    for owner in owners:
        store.execute(_ABANDON, (member, owner))
    return _read(store, member, now)[1]


def enter(store: SqlStore, member_code: str, quota_id: int, now: float) -> MemberHistory:
    """Store that a member was sent to a link."""
    member = member_text(member_code)
    store.lock(f"links {member}")
    change = "UPDATE links SET entered = coalesce(entered, ?), changed = ? WHERE member = ? AND quota = ?"
    store.execute(change, (now, now, member, quota_id))
    note_entered(store, member_code, quota_id, now)
    return _read(store, member, now)[1]


Row: TypeAlias = "tuple[str, str, tuple[Any, ...]]"
"""A member, what a row is about, and its values."""


class Changes:
    """Reads what the store knows of all members, and then what was added to it. It is used by one task."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._read_at = 0.0
        self._seen: set[Row] = set()  # rows of the last minute
        self._facts, self._invites = _Rows("facts", "id"), _Rows("invites", "rowid")

    def all(self, since: float, now: float) -> tuple[Histories, int]:
        """Return the histories of all members, from a moment on, and what `apply` returns. It may block."""
        histories = Histories()
        with self._store.reading("cannot be read", is_long=True) as run:
            for each in (self._facts, self._invites):
                each.look(run)
            damaged = apply(_links_since(run, since), histories, now)
            damaged += apply(_ends(run, 0, since), histories, now)
            damaged += apply(_invites(run, "invited > ? OR entered > ?", since, since), histories, now)
        self._note_read(now, set())
        return histories, damaged

    def added(self, now: float) -> list[Row]:
        """Return what was added since the last reading. It may block.

        The store may have been written to by a clock that differs, so the last minute is read again. A fact may
        become visible after one with a higher number, so those of the last minute are read again as well.
        """
        since = self._read_at - CLOCK_STEP
        with self._store.reading("cannot be read") as run:
            fact, invite = self._facts.look(run), self._invites.look(run)
            rows = {
                *_links_since(run, since),
                *_ends(run, fact, -inf),
                *_invites(run, "rowid > ? OR entered > ?", invite, since),
            }
        added = list(rows - self._seen)
        self._note_read(now, rows)
        return added

    def _note_read(self, now: float, rows: set[Row]) -> None:
        """Note a reading that has not failed: after one that has, its rows are read again."""
        self._read_at, self._seen = now, rows
        self._facts.note_read()
        self._invites.note_read()


class _Rows:
    """Up to which number the rows of a table were read.

    A row may become visible after one with a higher number. So as long as numbers are missing, what came in the
    last minute is read again.
    """

    def __init__(self, table: str, number: str) -> None:
        self._last = f"SELECT coalesce(max({number}), 0) FROM {table}"  # noqa: S608  constants, as the next
        self._count = f"SELECT count(*) FROM {table} WHERE {number} > ? AND {number} <= ?"  # noqa: S608
        self._marks: deque[int] = deque(maxlen=_READINGS)  # the last number of each reading
        self._looked, self._is_whole = 0, False  # the last number now, and whether none is missing up to it

    def look(self, run: Callable[..., Any]) -> int:
        """Return from which number on rows are to be read now."""
        (self._looked,) = run(self._last).fetchone()
        read = min(self._marks, default=0)
        self._is_whole = bool(self._marks) and run(self._count, (read, self._looked)).fetchone() == (
            self._looked - read,
        )
        return read

    def note_read(self) -> None:
        """Note that all rows up to there were read."""
        if self._is_whole:
            self._marks.clear()
        self._marks.append(self._looked)


def _ends(run: Callable[..., Any], after: int, since: float) -> Iterator[Row]:
    query = _ENDS.format(columns="member,", condition="id > ? AND at > ?")
    for member, *end in run(query, (after, since)):
        yield member, "end", tuple(end)


def _invites(run: Callable[..., Any], which: str, *values: float | str) -> Iterator[Row]:
    """Yield what other senders, such as campaigns, have invited to, and which invites were entered."""
    query = (
        f"SELECT member, survey, wave, quota, invited, entered FROM invites AS i WHERE ({which})"  # noqa: S608
        " AND (entered IS NOT NULL OR NOT EXISTS (SELECT 1 FROM links AS l"
        " WHERE l.member = i.member AND l.quota = i.quota AND l.state != 'refused'))"
    )
    for member, survey_id, wave_id, quota_id, invited, entered in run(query, values):
        if entered is None:
            yield member, "invite", (survey_id, wave_id, invited)
        else:
            yield member, "start", (survey_id, wave_id, quota_id, entered)


def _links_since(run: Callable[..., Any], since: float) -> Iterator[Row]:
    # Without the invites: they are secret, and the greater part.
    columns = _LINK.replace("invite,", "NULL,")
    for member, *link in run(f"SELECT member, {columns} FROM links WHERE changed > ?", (since,)):  # noqa: S608
        yield member, "link", tuple(link)


def apply(rows: Iterable[Row], histories: Histories, now: float) -> int:
    """Add rows to the histories of their members, by the text of the member in the store.

    Rows with values that nobody writes are left out; it returns how many. Their members learn it at a click.
    """
    damaged = 0
    for member, what, values in rows:
        try:
            history = histories.of(member)
            _add(history, what, values, now)
            histories.put(member, history)
        except UNUSABLE:
            damaged += 1
    return damaged


def entered_in(rows: Iterable[Row]) -> list[tuple[str, int]]:
    """Return the members and quotas of the links that rows say were entered."""
    return [
        (member, values[2] if what == "start" else values[0])
        for member, what, values in rows
        if what == "start" or (what == "link" and values[-1] is not None)
    ]


def _add(history: MemberHistory, what: str, values: tuple[Any, ...], now: float) -> None:
    if what == "link":
        history.add_link(Link(*values), now)
    elif what == "end":
        history.add_end(*values)
    elif what == "start":
        history.add_start(*values)
    else:
        history.add_invite(*values)
