"""The status of an inbox: how many facts wait for handlers, and how many are dead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from sampling_async.notifications._records import Kind

if TYPE_CHECKING:
    from sampling_async.notifications._facts import Backlog


@frozen(kw_only=True)
class KindStatus:
    """The facts of one kind.

    Attributes:
        pending: How many wait for their handler, or are with it now. Without a handler they wait for one.
        dead: How many wait for a replay.
        failed: How many calls of the handler have failed since the inbox was opened, in this process.
        oldest_seconds: The age of the oldest pending one, in seconds since it came; 0 if none is pending.
        has_handler: Whether this process handles them.
    """

    pending: int = 0
    dead: int = 0
    failed: int = 0
    oldest_seconds: float = 0.0
    has_handler: bool = False


@frozen(kw_only=True)
class InboxStatus(KindStatus):
    """The state of an inbox and of its store, see `Inbox.status`. The counts are sums over all kinds.

    Attributes:
        is_open: Whether it takes hits.
        not_stored: How many hits in a row could not be stored, and were answered with 503.
        by_kind: The counts of each kind; None stands for what was not understood.
    """

    is_open: bool
    not_stored: int
    by_kind: Mapping[Kind | None, KindStatus]


def status_of(
    backlog: Iterable[Backlog],
    failed: Mapping[Kind | None, int],
    handled: Collection[Kind | None],
    *,
    is_open: bool,
    not_stored: int,
    now: float,
) -> InboxStatus:
    by_kind = {
        kind: KindStatus(failed=failed.get(kind, 0), has_handler=kind in handled) for kind in (*Kind, None)
    }
    for row in backlog:
        by_kind[row.kind] = evolve(
            by_kind[row.kind],
            pending=row.pending,
            dead=row.dead,
            oldest_seconds=0.0 if row.oldest_at is None else max(0.0, now - row.oldest_at),
        )
    return InboxStatus(
        is_open=is_open,
        not_stored=not_stored,
        pending=sum(each.pending for each in by_kind.values()),
        dead=sum(each.dead for each in by_kind.values()),
        failed=sum(each.failed for each in by_kind.values()),
        oldest_seconds=max(each.oldest_seconds for each in by_kind.values()),
        has_handler=bool(handled),
        by_kind=by_kind,
    )
