"""The room of quotas that campaigns of one service share: each notes in a store what it may still use."""

from __future__ import annotations

from collections import Counter
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Final, Self

from attrs import frozen

from sampling_async.notifications import SqlStore
from sampling_async.notifications._stores import run_once, store_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sampling_async.campaign._ledger import CampaignLedger, Planning
    from sampling_async.notifications._stores import AnyStore

LEASE: Final = 86_400.0
"""How many seconds an invite may still end in a complete, and a campaign that was killed holds its room."""

_HELD: Final = """
SELECT quota, sum(pairs) FROM (
    SELECT quota, count(*) AS pairs FROM invites WHERE at >= ? GROUP BY quota
    UNION ALL SELECT quota, count(*) FROM pairs WHERE state IN ('pending', 'unknown') GROUP BY quota
) GROUP BY quota
"""
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS rooms (
    service TEXT NOT NULL, holder TEXT NOT NULL, quota BIGINT NOT NULL, pairs BIGINT NOT NULL,
    until DOUBLE PRECISION NOT NULL, PRIMARY KEY (service, holder, quota)
)
"""
_ROWS: Final = "rooms (service, holder, quota, pairs, until)"


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

    def of_others(self, now: float) -> Mapping[int, int]:
        """Return how many pairs other campaigns may still request, or may get completes of, by quota."""
        return run_once(self.store, partial(self._of_others, now=now))

    def take(
        self, ledger: CampaignLedger | Planning, now: float, *, seen: Mapping[int, int] | None = None
    ) -> None:
        """Note the pairs of a campaign that will be requested, or are invites that may still end in a complete.

        Raises:
            RoomTakenError: Others have more of a quota than was `seen`. Nothing was noted.
            StoreError: The store cannot be written.
        """
        until = now + LEASE
        rows = [(self.service, self.holder, *row, until) for row in ledger.read(_HELD, now - LEASE)]

        def noted(store: SqlStore) -> None:
            others = self._of_others(store, now)
            if seen is not None and any(count > seen.get(quota_id, 0) for quota_id, count in others.items()):
                raise RoomTakenError
            store.execute("DELETE FROM rooms WHERE service = ? AND holder = ?", (self.service, self.holder))
            store.insert(_ROWS, rows)

        run_once(self.store, noted)

    def _of_others(self, store: SqlStore, now: float) -> Mapping[int, int]:
        store.lock("rooms")  # one campaign at a time looks and takes
        store.execute(_TABLE)
        store.execute("DELETE FROM rooms WHERE until < ?", (now,))
        query = "SELECT quota, pairs FROM rooms WHERE service = ? AND holder != ?"
        found = Counter[int]()
        for quota_id, count in store.execute(query, (self.service, self.holder)):
            found[quota_id] += count
        return found
