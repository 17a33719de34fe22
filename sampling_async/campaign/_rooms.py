"""The room of quotas that campaigns of one service share: each notes in a store what it may still use."""

from __future__ import annotations

import json
import time
from collections import Counter
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from attrs import frozen

from sampling_async.campaign._ledger import INVITED
from sampling_async.notifications import PostgresStore, SqlStore, StoreError
from sampling_async.notifications._stores import run_once, store_of
from sampling_async.notifications._tables import ROOMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sampling_async.campaign._ledger import CampaignLedger, Planning
    from sampling_async.notifications._stores import AnyStore

_TAKEN: Final = f"""
SELECT survey, count(*) FROM pairs AS p JOIN quotas AS q ON q.id = p.quota
WHERE state = 'pending' OR (plan = ? AND {INVITED}) GROUP BY survey
"""  # noqa: S608  a constant
LEASE: Final = 86_400.0
"""How many seconds an invite may still end in a complete, and a campaign that was killed holds its room."""

_TRIES: Final = 10
_HELD: Final = """
SELECT q.id, q.survey, sum(pairs) FROM (
    SELECT quota, count(*) AS pairs FROM invites WHERE at >= ? GROUP BY quota
    UNION ALL SELECT quota, count(*) FROM pairs WHERE state IN ('pending', 'unknown') GROUP BY quota
) JOIN quotas AS q ON q.id = quota GROUP BY q.id
"""
_TABLE_OF: Final = {
    False: "SELECT max(name) FROM sqlite_master WHERE name = 'rooms'",
    True: "SELECT to_regclass('rooms')",
}
_ROWS: Final = "rooms (service, holder, quota, survey, pairs, until)"

Taken: TypeAlias = "Mapping[tuple[int, int], int]"
"""How many pairs are taken, by quota and survey."""


def left_of_surveys(ledger: CampaignLedger) -> dict[int, int]:
    """Return how many more invites each survey can use that has a room in the latest plan.

    That room is what earlier plans have left.
    """
    taken, rooms = dict(ledger.read(_TAKEN, ledger.plan)), json.loads(ledger.fact("survey_rooms") or "{}")
    return {int(each): room - taken.get(int(each), 0) for each, room in rooms.items()}


class RoomTakenError(Exception):
    """Another campaign has taken room since a plan was begun."""


@frozen
class SharedRoom:
    """What one campaign may use of the room that it shares.

    Attributes:
        store: The store.
        service: The address of the service: a quota ID is one quota there, whatever the panel.
        holder: The campaign.
    """

    store: SqlStore
    service: str
    holder: str

    @classmethod
    def of(cls, ledger: CampaignLedger, store: AnyStore, service: str) -> Self:
        """Return that of a campaign, by its ledger."""
        holder = ledger.fact("holder")
        if holder is None:
            holder = token_hex(8)
            ledger.note(holder=holder)
        return cls(store_of(store).copy(), service, holder)

    def of_others(self, now: float) -> Taken:
        """Return how many pairs other campaigns may still request, or may get completes of."""
        return run_once(self.store, partial(self._of_others, now=now))

    def take(self, ledger: CampaignLedger | Planning, now: float, *, seen: Taken | None = None) -> bool:
        """Note the pairs of a campaign that will be requested, or are invites that may still end in a complete.

        Returns:
            Whether it had lost room that others have now.

        Raises:
            RoomTakenError: Others have more of a quota than was `seen`. Nothing was noted.
            StoreError: The store cannot be written.
        """
        until = now + LEASE
        rows = [(self.service, self.holder, *row, until) for row in ledger.read(_HELD, now - LEASE)]

        def noted(store: SqlStore) -> bool:
            others = self._of_others(store, now)
            if seen is not None and any(count > seen.get(place, 0) for place, count in others.items()):
                raise RoomTakenError
            own = (self.service, self.holder)
            had = store.run("DELETE FROM rooms WHERE service = ? AND holder = ?", own).rowcount
            store.insert(_ROWS, rows)
            return not had and any((quota_id, survey_id) in others for _, _, quota_id, survey_id, *_ in rows)

        return run_once(self.store, noted)

    def take_patiently(
        self, planning: Planning, now: float, *, seen: Taken, check: Callable[[], object]
    ) -> None:
        """Take room for a plan; again while the store is busy or away, so that what was matched is not lost."""
        for left in reversed(range(_TRIES)):
            try:
                self.take(planning, now, seen=seen)
            except StoreError as exc:
                if exc.permanent or not left:
                    raise
                check()
                time.sleep(1)
            else:
                return

    def _of_others(self, store: SqlStore, now: float) -> Taken:
        store.lock("rooms")  # one campaign at a time looks and takes
        # Not IF NOT EXISTS alone: PostgreSQL refuses even that to whoever may make no tables.
        if store.execute(_TABLE_OF[isinstance(store, PostgresStore)]) == [(None,)]:
            store.execute(ROOMS)
        store.execute("DELETE FROM rooms WHERE until < ?", (now,))
        query = "SELECT quota, survey, pairs FROM rooms WHERE service = ? AND holder != ?"
        found = Counter[tuple[int, int]]()
        for quota_id, survey_id, count in store.execute(query, (self.service, self.holder)):
            found[quota_id, survey_id] += count
        return found
