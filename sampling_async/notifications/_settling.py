"""Settle what is unknown: which notifications prove that a pair of member and quota got an invite.

Only evidence settles, never its absence: nothing that comes proves that there is no invite.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attrs import field, frozen

from sampling_async._contract.records import hidden
from sampling_async.notifications._bodies import NotUnderstoodError
from sampling_async.notifications._entries import member_text
from sampling_async.notifications._records import Completion, InviteNotification, Kind, Terminate
from sampling_async.notifications._understanding import FieldReader, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from sampling_async import InviteOutcome, Survey
    from sampling_async.notifications._sql import SqlStore

_EVIDENCE: Final = """
SELECT id, at, kind, fields FROM facts WHERE kind IN ('invite', 'completion', 'terminate')
AND standing = 'stands' AND corrects IS NULL AND at >= {since!r} ORDER BY id
"""
_INVITES: Final = "SELECT quota, survey, wave FROM invites WHERE member = ?"
_LINKS: Final = "SELECT quota, survey, wave FROM links WHERE member = ? AND state != 'refused'"
_Record: TypeAlias = "InviteNotification | Completion | Terminate"


@frozen
class PossibleInvite:
    """A pair of member and quota that has an invite, or may have one.

    Attributes:
        is_unknown: Whether its outcome is unknown; False: there is an invite, or a response is still to come.
    """

    member_code: str = field(repr=hidden)
    quota_id: int
    survey_id: int
    wave_id: int
    is_unknown: bool


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


def possible_invites(outcomes: Iterable[InviteOutcome], surveys: Iterable[Survey]) -> Iterator[PossibleInvite]:
    """Yield the pairs of some outcomes that have an invite, or may have one, for `OutcomeLedger.settle`.

    Give all outcomes of a fan-out or journal. Quotas that are in none of the surveys cannot be settled.
    """
    places = {quota.quota_id: (each.survey_id, each.wave_id) for each in surveys for quota in each.quotas}
    for outcome in outcomes:
        place = places.get(outcome.quota_id)
        if outcome.invite is not None:
            place = outcome.invite.survey_id, outcome.invite.wave_id
        if place is not None and outcome.status in {"invited", "unknown"}:
            is_unknown = outcome.status == "unknown"
            yield PossibleInvite(outcome.member_code, outcome.quota_id, *place, is_unknown)


def settle(store: SqlStore, pairs: Iterable[PossibleInvite], since: float) -> Settlements:
    """Return which unknown pairs have an invite, by the notifications received since a moment.

    A notification settles a pair if it can be about no other one: neither of `pairs`, nor of the invites and
    links that the store knows. It may block.

    Args:
        store: The store.
        pairs: All pairs of members with an unknown one that have an invite, or may have one.
        since: When the first of the unknown ones can have been requested, in seconds since 1970.
    """
    by_member: dict[str, dict[int, PossibleInvite]] = {}
    for pair in pairs:
        known = by_member.setdefault(pair.member_code, {})
        # Of a pair that stands twice, the invite is known.
        if pair.quota_id not in known or not pair.is_unknown:
            known[pair.quota_id] = pair
    unknown = sum(pair.is_unknown for known in by_member.values() for pair in known.values())
    settled: dict[tuple[str, int], SettledPair] = {}
    unclear = 0
    with store.reading("cannot be read", is_long=True) as run:
        for member_code, known in by_member.items():
            for pair in _recorded(run, member_code):
                known[pair.quota_id] = pair
    with store.failing("cannot be read"):
        for number, at, record, has_wave in _records(store, since, by_member):
            meant = _meant(record, by_member[record.member_code].values(), has_wave=has_wave)
            unclear += len(meant) > 1 and any(pair.is_unknown for pair in meant)
            if len(meant) == 1 and meant[0].is_unknown:
                key = (record.member_code, meant[0].quota_id)
                evidence = SettledPair(
                    member_code=key[0],
                    quota_id=key[1],
                    kind=record.kind,
                    received_at=datetime.fromtimestamp(at, UTC),
                    fact_id=number,
                )
                settled.setdefault(key, evidence)
    return Settlements(settled=tuple(settled.values()), still_unknown=unknown - len(settled), unclear=unclear)


def _recorded(run: Callable[..., Any], member_code: str) -> Iterator[PossibleInvite]:
    """Yield what the store knows of a member's invites: recorded ones, and links that may be some."""
    for query in (_INVITES, _LINKS):
        for quota_id, survey_id, wave_id in run(query, (member_text(member_code),)).fetchall():
            yield PossibleInvite(member_code, quota_id, survey_id, wave_id, is_unknown=False)


def _records(
    store: SqlStore, since: float, members: Mapping[str, object]
) -> Iterator[tuple[int, float, _Record, bool]]:
    """Yield the notifications about some members: the fact, its time, the record, and if it names a wave."""
    for rows in store.in_parts(_EVIDENCE.format(since=float(since))):
        for number, at, kind, text in rows:
            fields = json.loads(text)
            # Most are about others, and need not be understood.
            if members.keys().isdisjoint(map(str, fields.values())):
                continue
            named = FieldReader(fields)
            try:
                record = parse(Kind(kind), named)
            except NotUnderstoodError:
                continue
            if isinstance(record, _OF_MEMBERS) and record.member_code in members:
                yield number, at, record, named.has_wave


_OF_MEMBERS: Final = (InviteNotification, Completion, Terminate)


def _meant(record: _Record, pairs: Iterable[PossibleInvite], *, has_wave: bool) -> list[PossibleInvite]:
    """Return the pairs that a notification may be about; none if it proves no invite."""
    survey_id, any_wave = record.survey_id, not has_wave
    if isinstance(record, InviteNotification):
        # Such a notification may also request an invite. One that was made has a survey and a wave.
        if survey_id is None or any_wave:
            return []
    elif record.original_survey_id not in (None, survey_id):
        # The member was routed: the invite was of the other survey, and the wave is that of this one.
        survey_id, any_wave = record.original_survey_id, True
    elif record.is_auto_routed and record.original_survey_id is None:
        return []  # nobody says from where
    return [
        pair
        for pair in pairs
        if pair.survey_id == survey_id
        and (any_wave or pair.wave_id == record.wave_id)
        and record.quota_id in (None, pair.quota_id)
    ]
