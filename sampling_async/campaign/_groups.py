"""What came of groups of members, such as those of an age band.

The ledger has a number for each planned member, a byte for each kind of group: its place in the fact `groups`.
See `GroupReader`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from sampling_async.campaign._ends import EndSums
from sampling_async.campaign._summary import MemberGroup
from sampling_async.matching.panel._columns import GROUP_BITS, LAST_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sampling_async.campaign._ledger import CampaignLedger

_ENDS: Final = {0: "not known", LAST_GROUP: "others"}
_FEW: Final = 15  # more groups of a kind are in the order of their invites
_BY_QUOTA: Final[dict[str, Any]] = dict.fromkeys(("expected", "completes_by_ir", "completes_planned"))
"""What is known by quota only: what was expected."""
_COUNTS: Final = """
SELECT coalesce(m.grouped, 0), sum(p.planned), sum(p.invited) FROM (
    SELECT member, count(*) AS planned, sum(state = 'invited') AS invited FROM pairs GROUP BY member
    UNION ALL SELECT member, 0, count(*) FROM settled GROUP BY member
) AS p JOIN members AS m ON m.id = p.member GROUP BY 1
"""


def groups_of(ledger: CampaignLedger, ends: Mapping[int, EndSums] | None) -> Iterator[MemberGroup]:
    """Yield what came of each group; `ends` by the number of the ledger, None if they are not known."""
    kinds = json.loads(ledger.fact("groups") or "{}")
    counts = ledger.read(_COUNTS) if kinds else []
    # A member may have been erased, or planned anew, since its ends were read: they are counted all the same.
    found = [(number, planned, EndSums(Counter(invited=invited))) for number, planned, invited in counts]
    found += [(number, 0, of_number) for number, of_number in (ends or {}).items()]
    rates, added = ledger.currency_rates(), ledger.adding()
    for at, (kind, (column, values)) in enumerate(kinds.items()):
        planned, sums = Counter[int](), dict[int, EndSums]()
        for number, its_planned, of_number in found:
            place = number >> at * GROUP_BITS & LAST_GROUP
            planned[place] += its_planned
            sums.setdefault(place, EndSums()).take(of_number)
        names = dict(enumerate(values, 1)) | _ENDS
        known = sorted(planned.keys() - _ENDS.keys(), key=lambda place: _by_number(names[place]))
        if len(known) > _FEW:
            known.sort(key=lambda place: -sums[place].counts["invited"])
        # Without any, the panel has no such column.
        for place in [*known, *(planned.keys() & _ENDS.keys())] if known else ():
            yield MemberGroup(
                kind=kind,
                question=column,
                value=names[place],
                planned=planned[place],
                invited=sums[place].counts["invited"],
                ends=None if ends is None else evolve(sums[place].conversion(added, rates), **_BY_QUOTA),
            )


def _by_number(value: str) -> tuple[int, str]:
    found = re.match(r"\d+", value)
    return int(found[0]) if found else 0, value
