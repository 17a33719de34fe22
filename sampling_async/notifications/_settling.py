"""Settle what is unknown: which notifications prove that a pair of member and quota got an invite.

Only evidence settles, never its absence: nothing that comes proves that there is no invite.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from itertools import groupby, islice
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from attrs import evolve, field, frozen

from sampling_async._contract.checks import moment_of, number_from_0, require_instance
from sampling_async._contract.records import hidden
from sampling_async.notifications._bodies import NotUnderstoodError
from sampling_async.notifications._entries import member_key, member_text, stand_in, text_code
from sampling_async.notifications._records import Completion, InviteNotification, Kind, Terminate
from sampling_async.notifications._stores import run_once
from sampling_async.notifications._understanding import FieldReader, parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sampling_async import InviteOutcome, Survey
    from sampling_async.notifications._sql import SqlStore

_KNOWN: Final = """
SELECT quota, survey, wave, CAST(NULL AS DOUBLE PRECISION) AS asked FROM invites WHERE member = ?
UNION ALL SELECT quota, survey, wave, CASE state WHEN 'unclear' THEN asked END FROM links
    WHERE member = ? AND state != 'refused'
"""
# What is overruled or a correction proves nothing new, but may say that the member was routed.
_ENDS: Final = """
SELECT key, id, at, kind, standing = 'stands' AND corrects IS NULL, fields FROM facts
WHERE member = ? AND kind IN ('completion', 'terminate') AND id <= ? ORDER BY key, id
"""
_INVITES: Final = """
SELECT id, at, fields FROM facts
WHERE kind = 'invite' AND standing = 'stands' AND at >= {since!r} AND id <= {last} ORDER BY id
"""
_INTO_INVITES: Final = ("invites (key, member, quota, survey, wave, invited)", "ON CONFLICT (key) DO NOTHING")
# What was refused to another request may be an invite of this one.
_INTO_LINKS: Final = (
    "links (member, quota, survey, wave, state, asked, until, changed)",
    (
        "ON CONFLICT (member, quota) DO UPDATE SET state = 'unclear', asked = excluded.asked,"
        " until = excluded.until, changed = excluded.changed, code = NULL WHERE links.state = 'refused'"
    ),
)
_AT_ONCE: Final = 5_000
_SLACK: Final = 3600.0  # seconds: the clocks of two hosts may be so far apart
_MUST_BE_READ: Final = frozenset({"quotaid", "originalsurveyid", "isautorouted"})
_Record: TypeAlias = "InviteNotification | Completion | Terminate"


@frozen
class PossibleInvite:
    """A pair of member and quota that has an invite, or may have one.

    Attributes:
        survey_id: The survey of the quota, with `wave_id`; None if that is not known. Such a pair is never
            settled, but what is said of another one may be about it.
        unknown_since: If the outcome of the pair is unknown: when it was requested, in seconds since 1970.
            None: there is an invite, or a response is still to come.
    """

    member_code: str = field(repr=hidden)
    quota_id: int
    survey_id: int | None
    wave_id: int | None
    unknown_since: float | None = None


def checked_pair(pair: PossibleInvite) -> PossibleInvite:
    """Return a pair that a user has made; refuse what would look like damage of the store."""
    require_instance(pair, PossibleInvite, "each pair", "a PossibleInvite")
    number_from_0(pair.unknown_since or 0, "PossibleInvite.unknown_since", "seconds since 1970")
    return evolve(pair, member_code=text_code(pair.member_code))


class RecordedInvite(NamedTuple):
    """An invite that is known, and when it was made."""

    member_code: str
    quota_id: int
    survey_id: int
    wave_id: int
    at: float

    def __repr__(self) -> str:
        return f"<RecordedInvite for quota {self.quota_id}>"


@frozen(kw_only=True)
class SettledPair:
    """A pair whose outcome was unknown, and the notification that proves its invite. Its link stays unknown.

    Attributes:
        member_code: The member.
        quota_id: The quota.
        kind: What proves it: an invite notification, a completion or a terminate.
        received_at: When that was received.
        fact_id: The fact in the store.
    """

    member_code: str = field(repr=hidden)
    quota_id: int
    kind: Kind
    received_at: datetime
    fact_id: int


@frozen(kw_only=True)
class Settlements:
    """What the notifications of a store say about pairs whose outcome is unknown.

    Attributes:
        settled: The pairs that have an invite, each with its evidence.
        still_unknown: How many pairs nothing was said about.
        unclear: How many notifications fit several pairs of their member, and so settle none.
    """

    settled: tuple[SettledPair, ...]
    still_unknown: int
    unclear: int

    def by_kind(self) -> Mapping[Kind, int]:
        """Return how many pairs were settled by which kind of notification."""
        return Counter(each.kind for each in self.settled)


def possible_invites(
    outcomes: Iterable[InviteOutcome], surveys: Iterable[Survey], since: datetime
) -> Iterator[PossibleInvite]:
    """Yield the pairs of some outcomes that have an invite, or may have one, for `OutcomeLedger.settle`.

    Args:
        outcomes: All outcomes of a fan-out or journal: what is said of one pair may be about another.
        surveys: The inventory that they were requested with. Quotas that it has not cannot be settled.
        since: When the first of them can have been requested; it has a time zone.

    Raises:
        InvalidRequestError: `since` has no time zone.
    """
    moment = moment_of(since, "since")
    places = {quota.quota_id: (each.survey_id, each.wave_id) for each in surveys for quota in each.quotas}
    for outcome in outcomes:
        code, quota_id, invite = outcome.member_code, outcome.quota_id, outcome.invite
        if invite is not None:
            yield PossibleInvite(code, quota_id, invite.survey_id, invite.wave_id)
        elif outcome.status == "unknown":
            survey_id, wave_id = places.get(quota_id, (None, None))
            yield PossibleInvite(code, quota_id, survey_id, wave_id, moment)


def record(
    store: SqlStore, made: Iterable[RecordedInvite], unknown: Iterable[PossibleInvite], now: float
) -> None:
    """Enter invites into the ledger of outcomes, and unknown pairs as links that are unclear.

    So other campaigns and routers leave them out, and `settle` knows what else evidence may be about. Members
    that were erased from the store are left out. It may block.
    """
    invites = (
        (code, (member_key(survey, wave, code), member_text(code), quota, survey, wave, at))
        for code, quota, survey, wave, at in made
    )
    # One statement must not change a row twice.
    pairs = {(each.member_code, each.quota_id): each for each in unknown}
    links = (
        (
            code,
            (member_text(code), quota, each.survey_id, each.wave_id, "unclear", each.unknown_since, inf, now),
        )
        for (code, quota), each in pairs.items()
    )
    for (into, on_conflict), rows in ((_INTO_INVITES, invites), (_INTO_LINKS, links)):
        while some := list(islice(rows, _AT_ONCE)):
            run_once(store.copy(), partial(_insert, into=into, rows=some, on_conflict=on_conflict))


def _insert(
    store: SqlStore, into: str, rows: Iterable[tuple[str, tuple[object, ...]]], on_conflict: str
) -> None:
    erased = {member for (member,) in store.execute("SELECT member FROM erased")}
    values = [row for code, row in rows if not (erased and member_text(stand_in(code)) in erased)]
    store.insert(into, values, on_conflict=on_conflict)


def settle(store: SqlStore, pairs: Iterable[PossibleInvite]) -> Settlements:
    """Return which unknown pairs have an invite, by the notifications of a store.

    A notification settles a pair if it came after the pair was requested, and can be about no other one:
    neither of `pairs`, nor of what the store knows. It may block.

    Args:
        store: The store.
        pairs: All pairs of members with an unknown one that have an invite, or may have one.
    """
    # Read first: what comes meanwhile may be about an invite that was made meanwhile.
    last, judge = store.last_id(), _Judge(pairs)
    with store.reading("cannot be read", is_long=True) as run, store.as_written():
        for code in judge.since:
            text = member_text(code)
            for row in run(_KNOWN, (text, text)).fetchall():
                judge.add_known(code, *row)
            for evidence in _ends(run(_ENDS, (text, last)).fetchall()):
                judge.weigh(evidence)
    if judge.since:
        for evidence in _invites(store, min(judge.since.values()), last, judge.since):
            judge.weigh(evidence)
    return judge.settlements()


class _Evidence(NamedTuple):
    """A notification, and the survey and wave of the invite that it is about; None is any wave."""

    fact_id: int
    at: float
    record: _Record
    survey_id: int
    wave_id: int | None


class _Judge:
    """Knows all pairs of members with an unknown one, and decides what evidence is about.

    Attributes:
        since: When the first unknown pair of each of these members was requested.
    """

    def __init__(self, pairs: Iterable[PossibleInvite]) -> None:
        self._pairs: dict[str, dict[tuple[int, int | None, int | None], PossibleInvite]] = {}
        self._settled: dict[tuple[str, int], SettledPair] = {}
        self._unknown = self._unclear = 0
        self.since: dict[str, float] = {}
        for pair in pairs:
            known = self._pairs.setdefault(pair.member_code, {})
            key = (pair.quota_id, pair.survey_id, pair.wave_id)
            # Of a pair that stands twice, the invite is known.
            if key not in known or pair.unknown_since is None:
                known[key] = pair
        for code, known in self._pairs.items():
            times = [pair.unknown_since for pair in known.values() if pair.unknown_since is not None]
            if times:
                self.since[code] = min(times)
                self._unknown += len(times)

    def add_known(self, code: str, quota_id: int, survey_id: int, wave_id: int, asked: float | None) -> None:
        """Add what the store knows of a member: an invite, or a link that may be one."""
        key = (quota_id, survey_id, wave_id)
        own = self._pairs[code].get(key)
        # What this very request has left there is the pair itself.
        if asked is None or own is None or own.unknown_since != asked:
            self._pairs[code][key] = PossibleInvite(code, *key)

    def weigh(self, evidence: _Evidence) -> None:
        """Settle the pair that a notification is about, if it can be about no other one."""
        at, record = evidence.at, evidence.record
        meant = [
            pair
            for pair in self._pairs[record.member_code].values()
            if pair.survey_id in (None, evidence.survey_id)
            and (evidence.wave_id is None or pair.wave_id in (None, evidence.wave_id))
            and record.quota_id in (None, pair.quota_id)
            # The time that it names itself says little: services write it without its zone.
            and (pair.unknown_since is None or at >= pair.unknown_since - _SLACK)
        ]
        if len(meant) != 1:
            self._unclear += any(pair.unknown_since is not None for pair in meant)
            return
        (pair,) = meant
        if pair.unknown_since is not None and pair.survey_id is not None and at >= pair.unknown_since:
            found = SettledPair(
                member_code=record.member_code,
                quota_id=pair.quota_id,
                kind=record.kind,
                received_at=datetime.fromtimestamp(at, UTC),
                fact_id=evidence.fact_id,
            )
            known = self._settled.setdefault((record.member_code, pair.quota_id), found)
            if found.fact_id < known.fact_id:
                self._settled[record.member_code, pair.quota_id] = found

    def settlements(self) -> Settlements:
        return Settlements(
            settled=tuple(self._settled.values()),
            still_unknown=self._unknown - len(self._settled),
            unclear=self._unclear,
        )


def _invites(store: SqlStore, since: float, last: int, members: Mapping[str, object]) -> Iterator[_Evidence]:
    """Yield the invite notifications about some members."""
    with store.failing("cannot be read"), store.as_written():
        for rows in store.in_parts(_INVITES.format(since=since, last=last)):
            for number, at, text in rows:
                fields = json.loads(text)
                # Most are about others, and need not be understood.
                if members.keys().isdisjoint(map(str, fields.values())):
                    continue
                record, named = _read(Kind.INVITE, fields)
                if not isinstance(record, InviteNotification) or record.member_code not in members:
                    continue
                # It may also request an invite. One that was made has a survey and a wave.
                if record.survey_id is not None and record.wave_id is not None and _is_readable(named):
                    yield _Evidence(number, at, record, record.survey_id, record.wave_id)


def _ends(rows: Iterable[tuple[Any, ...]]) -> Iterator[_Evidence]:
    """Yield the ends of a member."""
    for _, group in groupby(rows, key=lambda row: row[0]):
        found = [(row, *_read(Kind(row[3]), json.loads(row[5]))) for row in group]
        ends = [record for _, record, _ in found if isinstance(record, Completion | Terminate)]
        # Only one of several notifications about an end may say that the member was routed.
        origins = {end.original_survey_id for end in ends if end.original_survey_id is not None}
        was_routed = any(end.is_auto_routed for end in ends)
        if not ends or not all(_is_readable(named) for _, _, named in found) or len(origins) > 1:
            continue
        origin = next(iter(origins), ends[0].survey_id)
        is_elsewhere = origin != ends[0].survey_id
        if was_routed and not is_elsewhere:
            continue  # nobody says from where
        for (_, number, at, _, stands, _), record, named in found:
            if stands and isinstance(record, Completion | Terminate):
                # Of a routed member, the wave is that of the survey in which it ended.
                wave_id = record.wave_id if named.has_wave and not is_elsewhere else None
                yield _Evidence(number, at, record, origin, wave_id)


def _read(kind: Kind, fields: Mapping[str, Any]) -> tuple[object, FieldReader]:
    named = FieldReader(fields)
    try:
        return parse(kind, named), named
    except NotUnderstoodError:  # another version has understood it
        return None, named


def _is_readable(named: FieldReader) -> bool:
    """Return whether what decides was not there, or could be read."""
    return _MUST_BE_READ.isdisjoint(named.unread)
