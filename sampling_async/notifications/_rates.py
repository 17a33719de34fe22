"""Read from the ledger of outcomes how many invites ended in a complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sampling_async._protocol.rates import LearnedRates

if TYPE_CHECKING:
    from sampling_async.notifications._sql import SqlStore

# Wave 0 means that the service named none.
_HAS: Final = """
EXISTS (
    SELECT 1 FROM facts AS f WHERE f.kind = '{kind}' AND f.standing = 'stands' AND f.corrects IS NULL
    AND (f.key = i.key OR (
        f.member = i.member AND i.survey = coalesce(f.origin, CASE f.wave WHEN 0 THEN f.survey END)
    ))
)
"""
# A complete that was taken back is none.
_RATES: Final = f"""
SELECT i.survey, i.quota, count(*),
    sum(CASE WHEN {_HAS.format(kind="completion")} AND NOT {_HAS.format(kind="reconciliation")}
        THEN 1 ELSE 0 END)
FROM invites AS i WHERE {{at}} >= ? AND {{at}} < ? GROUP BY i.survey, i.quota
"""  # noqa: S608  of constants


def read_rates(store: SqlStore, since: float, until: float, *, entered: bool) -> LearnedRates:
    """Return the rates of invites that were made between two moments, or entered. It may block."""
    at = "i.entered" if entered else "i.invited"
    with store.reading("cannot be read", is_long=True) as run:
        rows = run(_RATES.format(at=at), (since, until)).fetchall()
    surveys: dict[int, tuple[int, int]] = {}
    quotas: dict[int, tuple[int, int]] = {}
    for survey, quota, invites, completes in rows:
        for counts, of in ((surveys, survey), (quotas, quota)):
            before = counts.get(of, (0, 0))
            counts[of] = before[0] + int(invites), before[1] + int(completes)
    return LearnedRates(surveys=surveys, quotas=quotas)
