"""Notifications that take effect on an inventory that is watched."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import anyio

from sampling_async import InvalidRequestError
from sampling_async._contract.checks import whole_number
from sampling_async._pacing.background import BackgroundService
from sampling_async._pacing.steps import LoopYielder
from sampling_async.notifications import Fact, Inbox, QuotaStatus, StoreError, SurveyClosed, Validity
from sampling_async.notifications._facts import DamagedStoreError

if TYPE_CHECKING:
    from sampling_async import QuotaWatch

_log: Final = logging.getLogger("sampling_async.matching")
_RETRY_SECONDS: Final = 5.0
_SKEW: Final = timedelta(minutes=5)  # how far the clock of the service may be behind this machine's


class Following(BackgroundService):
    """The notifications of an inbox take effect while this block is open; see `LiveIndex.follow`.

    Attributes:
        after: The ID of the last fact that was read.
    """

    _called = "following"

    def __init__(self, watch: QuotaWatch, inbox: Inbox, after: int) -> None:
        super().__init__()
        if not isinstance(inbox, Inbox):
            raise InvalidRequestError(f"follow takes an Inbox, not a {type(inbox).__name__}")
        self.after = whole_number(after, "after", least=0)
        self._watch = watch
        self._inbox = inbox

    async def _work(self) -> None:
        turns = LoopYielder()
        while True:
            try:
                facts: Any = self._inbox.facts(QuotaStatus, SurveyClosed, after=self.after, follow=True)
                async for fact in facts:
                    self._apply(fact)
                    self.after = fact.id
                    await turns.step()
            except StoreError as exc:
                if isinstance(exc, DamagedStoreError) and exc.fact_id is not None:
                    # What it has closed is not known: a poll decides.
                    _log.error("%s; it is left out, and the inventory is polled", exc)
                    self.after = exc.fact_id
                    self._watch.refresh_soon()
                    continue
                # The cause may pass: a full disk, a locked file.
                _log.warning("notifications cannot be read, they are tried again: %s", exc)
                await anyio.sleep(_RETRY_SECONDS)

    def _apply(self, fact: Fact[QuotaStatus | SurveyClosed]) -> None:
        change, received = fact.notification, fact.received_at
        if fact.validity != Validity.STANDS:
            return
        if isinstance(change, SurveyClosed):
            # Wave 0 stands for all waves, as in SurveyWaveExclusions.
            was_open = self._watch.close_survey(change.survey_id, change.wave_id or None, at=received)
        elif change.is_live:
            # Services repeat this for all quotas. It matters only for quotas that are not known to be open.
            if not self._is_older(change.at, _SKEW) and not self._watch.is_open(change.quota_id):
                self._watch.refresh_soon(received)
            return
        else:
            was_open = self._watch.close_quota(change.quota_id, at=received)
        if was_open and self._is_older(change.at):
            # By the service's own clock, the newest poll is newer than this: it came late, or the clocks
            # differ. It is closed all the same, because that does less harm, and a poll decides soon.
            self._watch.refresh_soon()

    def _is_older(self, moment: datetime | None, margin: timedelta = timedelta()) -> bool:
        """Return whether a moment, if known, is before the begin of the newest poll by more than a margin."""
        since = self._watch.since
        return since is not None and moment is not None and moment < since - margin
