"""Which pairs of a campaign have an invite, or may have one: what notifications can be about."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from sampling_async.campaign._ledger import IN_FLIGHT
from sampling_async.notifications._settling import PossibleInvite, RecordedInvite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sampling_async.campaign._ledger import CampaignLedger

_POSSIBLE: Final = f"""
WITH held AS (
    SELECT p.member, p.quota,
        CASE WHEN p.state = 'unknown' AND s.kind IS NULL THEN max(p.due, r.began) END AS since
    FROM (SELECT coalesce(min(began), 0.0) AS began FROM runs) AS r, pairs AS p
    LEFT JOIN settled AS s USING (member, quota) WHERE p.state IN ('invited', 'unknown')
    UNION ALL SELECT *, {{lost}} FROM ({IN_FLIGHT})
)
SELECT m.code, h.quota, q.survey, q.wave, h.since
FROM held AS h JOIN members AS m ON m.id = h.member JOIN quotas AS q ON q.id = h.quota
WHERE h.member IN (SELECT member FROM held WHERE since IS NOT NULL)
"""  # noqa: S608  of constants
_MADE: Final = """
SELECT m.code, i.quota, i.survey, i.wave, i.at FROM invites AS i JOIN members AS m ON m.id = i.member
WHERE NOT (i.url = '' AND m.code LIKE 'erased-%')
"""
_SETTLED: Final = """
SELECT m.code, s.quota, q.survey, q.wave, s.at
FROM settled AS s JOIN members AS m ON m.id = s.member JOIN quotas AS q ON q.id = s.quota
WHERE m.code NOT LIKE 'erased-________________________________%'
"""


def possible_invites(ledger: CampaignLedger) -> Iterator[PossibleInvite]:
    """Yield the pairs that have an invite, or may have one, of members with a pair that is unknown."""
    # What a run that was killed had in flight is unknown, also before the next run notes that.
    lost = "NULL" if ledger.is_running() else "(SELECT coalesce(max(began), 0.0) FROM runs)"
    yield from (PossibleInvite(*row) for row in ledger.read(_POSSIBLE.format(lost=lost), ledger.plan))


def made_invites(ledger: CampaignLedger) -> Iterator[RecordedInvite]:
    """Return the invites, settled ones included."""
    answered = map(RecordedInvite._make, chain.from_iterable(ledger.read_on(_MADE)))
    return chain(answered, settled_invites(ledger))


def settled_invites(ledger: CampaignLedger) -> Iterator[RecordedInvite]:
    """Return the invites that notifications have proven."""
    return map(RecordedInvite._make, chain.from_iterable(ledger.read_on(_SETTLED)))
