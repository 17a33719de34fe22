"""Which quotas a member fits now, and what each is worth: from the live index and the store."""

from __future__ import annotations

import logging
from heapq import nlargest
from math import inf
from typing import TYPE_CHECKING, Final

from sampling_async._pacing.threads import in_thread
from sampling_async.notifications import StoreError
from sampling_async.notifications._entries import member_text
from sampling_async.notifications._rates import Rates, read_rates
from sampling_async.routing._links import Changes, apply
from sampling_async.routing._route import Offer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sampling_async import Survey
    from sampling_async.matching import LiveIndex, Member
    from sampling_async.notifications._sql import SqlStore
    from sampling_async.routing._history import Caps, MemberHistory

_LOG: Final = logging.getLogger("sampling_async.routing")
_POSSIBLE: Final = 0.5  # the chance of a quota that a member may match, beside one that it certainly does
_RATES_SECONDS: Final = 600.0  # after which the shares of completes are read again
_UNDECIDED_SECONDS: Final = 3600.0  # for which an entered invite does not count for them


class OfferBook:
    """What is open, what it is worth, and what is known of members.

    Attributes:
        failure: Why the store could not be read the last time; empty if it could.
    """

    def __init__(
        self, live: LiveIndex, store: SqlStore, *, seconds: float, caps: Caps, clock: Callable[[], float]
    ) -> None:
        self.failure = ""
        self._live = live
        self._caps = caps
        self._clock = clock
        self._store = store
        self._seconds = seconds  # of links and ends that are known
        self._changes = Changes(store, seconds)
        self._histories: dict[str, MemberHistory] = {}
        self._rates = Rates()
        self._rates_at = -inf

    async def follow(self) -> None:
        """Read what the store has got since the last time, from other processes too."""
        now = self._clock()
        try:
            apply(await in_thread(self._changes.read, now), self._histories, now)
            if not self._rates_at <= now < self._rates_at + _RATES_SECONDS:
                # What was entered a moment ago has had no time to end.
                since, until = now - self._seconds, now - _UNDECIDED_SECONDS
                self._rates, self._rates_at = await in_thread(read_rates, self._store, since, until), now
        except StoreError as exc:
            self.failed(exc)
        else:
            self.failure = ""

    def failed(self, exc: StoreError) -> None:
        """Record that the store failed. It is logged once, until it can be read again."""
        if not self.failure:
            _LOG.warning("the links of members cannot be read or stored: %s", exc)
        self.failure = str(exc) or type(exc).__name__

    def learn(self, member_code: str, history: MemberHistory) -> None:
        """Take over what the store knows of a member."""
        self._histories[member_text(member_code)] = history

    def best(self, member: Member, most: int) -> list[Offer]:
        """Return what a member fits now, the best first, one quota a survey."""
        return nlargest(most, self._fitting(member, None), key=lambda offer: offer.value)

    def among(self, member: Member, quota_ids: Sequence[int]) -> list[Offer]:
        """Return those of some quotas that a member fits now, in their order."""
        places = {quota_id: place for place, quota_id in enumerate(quota_ids)}
        return sorted(self._fitting(member, places), key=lambda offer: places[offer.quota_id])

    def _fitting(self, member: Member, only: Iterable[int] | None) -> list[Offer]:
        history, now = self._histories.get(member_text(member.member_code)), self._clock()
        if history is not None and history.gets_nothing(self._caps, now):
            return []
        allowed = None if only is None else frozenset(only)
        matched, found, surveys = self._live.match(member), list[Offer](), set[int]()
        for quotas, share in ((matched.certain, 1.0), (matched.possible, _POSSIBLE)):
            for target in quotas.targets():
                survey, quota_id = target.survey, target.quota.quota_id
                if survey.survey_id in surveys if allowed is None else quota_id not in allowed:
                    continue
                if history is None or history.allows(quota_id, survey.survey_id, now):
                    surveys.add(survey.survey_id)
                    found.append(self._offer(survey, quota_id, share))
        return found

    def _offer(self, survey: Survey, quota_id: int, share: float) -> Offer:
        chance = self._rates.chance(survey.survey_id, survey.ir)
        return Offer(
            quota_id=quota_id,
            survey_id=survey.survey_id,
            wave_id=survey.wave_id,
            loi=survey.loi,
            ir=survey.ir,
            price=survey.price,
            value=survey.price.amount * chance * share,
            is_certain=share == 1,
            survey_name=survey.survey_name,
        )
